"""What a server says about its sampling sessions."""

from __future__ import annotations

from typing import Literal

from tinkex.types.fields.message import Response


class CreateSamplingSessionResponse(Response):
    """The id that sample requests name."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionResponse(Response):
    """This copy's number; the original client is 0."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Response):
    """The model that a sampling session samples from; `model_path` is None for a base model."""

    sampler_id: str
    base_model: str
    model_path: str | None = None

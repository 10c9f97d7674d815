"""`forward_backward_reverse_kl` as MinT's client sends it; ours names a teacher in a loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.fields.bounds import Id, Path, SeqId, listing
from tinkex.types.fields.message import Listing, Request, Response

MAX_DATUMS = 1024


class ReverseKLDatum(Request):
    """A continuation of two contexts: what the model that learns read, and what the reference."""

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    """The continuation, from the token after each context on."""
    weights: TensorData
    """How much each of its tokens counts."""


class ForwardBackwardReverseKLRequest(Request):
    """Gather the gradient of the KL from a model to a reference at sampled continuations."""

    model_id: Id
    reference_model_path: Path
    data: Annotated[list[ReverseKLDatum], *listing(MAX_DATUMS, 1)]
    temperature: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Only 1 is computed."""
    seq_id: SeqId | None = None
    """Not a number of the client's stream, which MinT's client does not count here: not read."""
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"


class ReverseKLOutput(Response):
    """The loss of a datum, summed over its tokens."""

    loss: TensorData


class ForwardBackwardReverseKLResponse(Response):
    """A loss for each datum, and means over the tokens whose weight is not 0."""

    outputs: Listing[ReverseKLOutput]
    metrics: dict[str, float]
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"

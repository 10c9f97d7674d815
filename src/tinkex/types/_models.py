"""The two pydantic bases: what we send is checked for unknown fields, what we receive is not."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Request(BaseModel):
    """Frozen; an unknown or non-finite field is an error at construction, not on the server."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )


class Response(BaseModel):
    """Frozen; fields of newer servers are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

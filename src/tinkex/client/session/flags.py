"""What a server says about itself in `/client/config` and `/client/dynamic_config`.

Unknown flags are ignored, missing ones take the contract's defaults (3.2, 3.3). A server without
the endpoint is of the old generation: JSON bodies, small serial chunks, `/forward` on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from tinkex.types.service.server import ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire import Generation

logger = logging.getLogger("tinkex.flags")


class ServerFlags(ClientConfigResponse):
    """Fetched once per holder."""

    # Extensions of our own server; other servers never send them.
    tinkex_sample_batch: bool = False
    """`/asample_batch` takes many samples in one call, `/retrieve_futures` can carry results."""
    tinkex_sample_stream: bool = False
    """`/sample_stream` sends tokens while they are generated."""
    tinkex_sampling_params: str = ""
    """Sampling parameters beyond those of the Tinker SDK that the server honours, with commas."""
    tinkex_routed_experts: bool = False
    """Samples of a mixture tell the experts of their tokens, and datums may prescribe them."""
    tinkex_teacher: bool = False
    """A loss may name a teacher, whose logprobs the server computes beside the pass."""
    old_generation: bool = False
    """The server has no `/client/config`: it speaks JSON as SDK 0.4.1 did."""

    @classmethod
    def from_json(cls, body: Any) -> Self:
        return cls.model_construct(**_usable(cls(), body))

    def without_extensions(self) -> Self:
        """As another server would say it: the plain contract."""
        ours = {name: value for name, value in type(self)() if name.startswith("tinkex_")}
        return self.model_copy(update=ours)

    @property
    def generation(self) -> Generation:
        return Generation.V0_4 if self.old_generation else Generation.V0_36

    @classmethod
    def for_old_server(cls) -> ServerFlags:
        return cls(old_generation=True, parallel_fwdbwd_chunks=False)


class DynamicFlags(ClientDynamicConfigResponse):
    """Fetched again every `refresh_interval_sec`."""

    @classmethod
    def from_json(cls, body: Any) -> Self:
        return cls.model_construct(**_usable(cls(), body))


def _usable(defaults: ServerFlags | DynamicFlags, body: Any) -> dict[str, Any]:
    """The values that have their default's type; a wrong one is logged and the default stays."""
    given = body if isinstance(body, Mapping) else {}
    kept: dict[str, Any] = {}
    for name, default in defaults:
        value = given.get(name)
        if value is None:
            continue
        if _fits(value, default):
            kept[name] = value
        else:
            logger.warning("Ignoring the server's flag %s=%r: wrong type.", name, value)
    return kept


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, (int, float)):
        return isinstance(value, (int, float)) and value >= 0
    return isinstance(value, type(default))

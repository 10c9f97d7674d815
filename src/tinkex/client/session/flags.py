"""What a server says about itself in `/client/config` and `/client/dynamic_config`.

Unknown flags are ignored, missing ones take the contract's defaults (3.2, 3.3). A server without
the endpoint is of the old generation: JSON bodies, small serial chunks, `/forward` on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tinkex.wire import Generation

__all__ = ["DynamicFlags", "ServerFlags"]

logger = logging.getLogger("tinkex.flags")


class _FromJson:
    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Keep what has the type of its default; a wrong type is logged and the default stays."""
        given = body if isinstance(body, Mapping) else {}
        kept: dict[str, Any] = {}
        for entry in fields(cls):  # type: ignore[arg-type]
            value = given.get(entry.name)
            if value is None:
                continue
            if _fits(value, entry.default):
                kept[entry.name] = value
            else:
                logger.warning("Ignoring the server's flag %s=%r: wrong type.", entry.name, value)
        return cls(**kept)

    def to_json(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, (int, float)):
        return isinstance(value, (int, float)) and value >= 0
    return isinstance(value, type(default))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags(_FromJson):
    """Fetched once per holder."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10_485_760
    inflight_response_bytes_semaphore_size: int = 52_428_800
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: float = 3600.0
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    # Extensions of our own server; other servers never send them.
    tinkex_sample_batch: bool = False
    """`/asample_batch` takes many samples in one call, `/retrieve_futures` can carry results."""
    tinkex_sample_stream: bool = False
    """`/sample_stream` sends tokens while they are generated."""
    tinkex_sampling_params: str = ""
    """Sampling parameters beyond those of the Tinker SDK that the server honours, with commas."""
    tinkex_routed_experts: bool = False
    """Samples of a mixture tell the experts of their tokens, and datums may prescribe them."""
    old_generation: bool = False
    """The server has no `/client/config`: it speaks JSON as SDK 0.4.1 did."""

    @property
    def generation(self) -> Generation:
        return Generation.of_server(has_client_config=not self.old_generation)

    @classmethod
    def for_old_server(cls) -> ServerFlags:
        return cls(
            old_generation=True,
            parallel_fwdbwd_chunks=False,
            fwdbwd_max_chunk_len=128,
            fwdbwd_max_chunk_bytes_count=500_000,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicFlags(_FromJson):
    """Fetched again every `refresh_interval_sec`."""

    refresh_interval_sec: float = 300.0
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64

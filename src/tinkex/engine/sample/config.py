"""How much memory a sampler takes, and how it computes."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.engine.numerics.ops import Ops
from tinkex.engine.sample.scheduler import SchedulerConfig
from tinkex.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig(SchedulerConfig):
    kv_bytes: int = 2 << 30
    """Memory for keys and values of one base model."""
    block_size: int = 16
    """Tokens per block; prefixes are shared in whole blocks."""
    packed_weights: bool = True
    """On a CPU, keep a second copy of the weights that makes decoding faster, if memory allows."""
    exact: bool = False
    """On a CPU, compute a token's bits as a deterministic trainer does: no packed weights."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        if self.kv_bytes < 1 or self.block_size < 1:
            raise ConfigError(
                "sampler.kv_bytes and sampler.block_size must be at least 1, got "
                f"{self.kv_bytes} and {self.block_size}"
            )

    @staticmethod
    def for_device(ops: Ops, *, deterministic: bool = False) -> SamplerConfig:
        """Defaults that fit a device: a GPU gives a third of what it has free, in larger passes."""
        if not ops.large_passes:
            return SamplerConfig(exact=deterministic)
        return SamplerConfig(kv_bytes=ops.free_bytes() // 3, max_pass_tokens=4096)

"""How a trainer cuts its work into passes."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.contract import traced
from tinkex.engine.numerics.ops import Ops
from tinkex.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    max_tokens: int = 2048
    """Most tokens in one pass; longer batches are split, longer datums go alone."""
    head_rows: int = 256
    """Rows whose logits exist at the same time."""
    activation_bytes: int = 3 << 29
    """What a pass may keep for its backward; what does not fit is computed again there."""
    loss_datum_s: float = traced.DATUM_S
    """Most seconds on the traced loss of one datum, looked at between its steps."""
    loss_job_s: float = traced.REQUEST_S
    """Most seconds on the traced loss of a whole job."""
    deterministic: bool = False
    """A shard's bits never depend on what else is in the batch: where the decoder cannot promise it
    for a packed pass, each datum gets one of its own."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "head_rows", "activation_bytes"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"trainer.{name} must be at least 1, got {value}")
        for name in ("loss_datum_s", "loss_job_s"):
            if (value := getattr(self, name)) <= 0:
                raise ConfigError(f"trainer.{name} must be above 0, got {value}")

    @staticmethod
    def for_device(ops: Ops, *, deterministic: bool = False) -> TrainerConfig:
        """Defaults that fit a device: a GPU takes larger passes and half of what it has free."""
        if not ops.large_passes:
            return TrainerConfig(deterministic=deterministic)
        return TrainerConfig(
            max_tokens=16384,
            head_rows=2048,
            activation_bytes=ops.free_bytes() // 2,
            deterministic=deterministic,
        )

"""Settings that every recipe has, and how they are checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.errors import ConfigError
from tinkex.recipes.learning_rate import Schedule, check_schedule

__all__ = ["RunOptions", "check_not_negative", "check_positive", "fixed_length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Settings of every recipe's run. A recipe adds its own, and its own defaults."""

    log_dir: str
    """Where metrics and checkpoint names go. The same folder resumes."""
    model: str = DEFAULT_MODEL
    """A base model, or the `tinker://` path of a checkpoint to train on from."""
    rank: int = 32
    learning_rate: float | Literal["auto"] = 1e-3
    """The peak; `auto` takes it from the model's size (`tinkex.recipes.get_lr`)."""
    schedule: Schedule = "linear"
    """After the warmup: down to a tenth of the peak, straight or as a cosine, or constant."""
    warmup: float = 0.0
    """Steps in which the learning rate rises to its peak; below 1 the share of all steps."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW."""
    clip: float = 0.0
    """Largest norm of the gradient of a step; a larger gradient is scaled down. 0 is off."""
    accumulate: int = 1
    """Forward-backward passes per optimizer step: a step takes this many batches."""
    eval_share: float = 0.1
    """Share of the rows, pairs or prompts held out; at most 200, or 32 where they are answered."""
    eval_data: str = ""
    """A file or dataset to evaluate on, all of it; nothing is held out of the others then."""
    eval_every: int = 20
    save_every: int = 50
    seed: int = 0
    trackers: tuple[str, ...] = ()
    """Any of wandb, trackio, tensorboard."""

    AUTO_SHARE: ClassVar[float] = 1.0
    """`auto` is this share of what `get_lr` says, which is meant for supervised training."""

    def __post_init__(self) -> None:
        check_positive(self, "rank", "accumulate", "eval_every", "save_every")
        if self.learning_rate != "auto":
            check_positive(self, "learning_rate")
        check_not_negative(self, "weight_decay", "clip")
        check_schedule(self.warmup)
        check_share(self)

    @property
    def is_evaluated(self) -> bool:
        return bool(self.eval_data or self.eval_share)


def fixed_length(config: RunOptions) -> bool:
    """Whether the learning rate of a step depends on how many there are."""
    return config.schedule != "constant" or 0 < config.warmup < 1


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0 and finite, got {value}.")


def check_not_negative(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be at least 0, got {value}.")


def check_share(config: Any) -> None:
    if not 0 <= config.eval_share < 1:
        raise ConfigError(
            f"eval_share must be at least 0 and below 1, got {config.eval_share}: it is the part "
            "of the rows that is held out, and the others are trained on."
        )

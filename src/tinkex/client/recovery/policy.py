"""When and how a lost training run is rebuilt: the policy, without any doing.

The doing is in `recovering_client.py`, the watching in `run_monitor.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.client.session.holder import Holder


@dataclass(frozen=True, slots=True)
class RecoveryEvent:
    """A loss or a recovery, as a callback is told of it."""

    run_id: str
    """The run that was lost."""
    reason: str
    attempt: int = 0
    new_run_id: str | None = None
    checkpoint: str | None = None
    num_repeated: int = 0
    """Calls that were made again on the new run."""
    num_forgotten: int = 0
    """Calls between the checkpoint and the first one remembered, whose effect is lost: not 0 only
    when the newest checkpoints could not be loaded."""


class SessionOwner(Protocol):
    """A `ServiceClient`, as far as a recovery needs to know it."""

    @property
    def holder(self) -> Holder: ...


Callback = Callable[[RecoveryEvent], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPolicy:
    """Which checkpoint to take, when to give up, and whom to tell."""

    checkpoint: str = "latest"
    """`latest`, `best` (see `metric`), or a `tinker://RUN/weights/NAME` path."""
    metric: str = "loss:sum"
    """What `best` compares: a metric of the results. Checkpoints carry it in user_metadata."""
    metric_mode: Literal["min", "max"] = "min"
    restore_optimizer: bool = True
    """False starts the optimizer afresh, for a run that was lost because it diverged."""
    repeat_calls: bool = True
    """Repeat what was done since the checkpoint when that is the latest: nothing is lost. False,
    or another checkpoint: only the calls since the last optim_step, so that a step is whole."""
    save_every_steps: int = 10
    """Save a checkpoint of our own after so many optim_steps; 0 leaves saving to you."""
    keep: int = 2
    """How many of our own checkpoints stay; older ones are deleted."""
    max_attempts: int = 8
    """Per loss. With the delays below, eight survive about four minutes without a server."""
    initial_delay_s: float = 2.0
    """Before the second attempt; doubles after each. The first attempt is made at once."""
    max_delay_s: float = 60.0
    attempt_timeout_s: float = 60.0
    """How long one attempt may try to reach the server."""
    monitor_interval_s: float = 30.0
    """How often the run is looked after while no result is awaited; 0 is never."""
    unreachable_s: float = 120.0
    """How long a server may stay silent, while a result is awaited, before its run counts as lost.
    A Tinkex server that comes back within it brings its runs back by itself."""
    connect: Callable[[], SessionOwner] | None = None
    """Makes the `ServiceClient` of an attempt; by default one like the first."""
    on_lost: Callback | None = None
    on_recovered: Callback | None = None
    on_failed: Callback | None = None

    def __post_init__(self) -> None:
        named = self.checkpoint.startswith("tinker://")
        if not named and self.checkpoint not in ("latest", "best"):
            raise ConfigError(
                f"checkpoint must be 'latest', 'best' or a tinker:// path, got {self.checkpoint!r}."
            )
        if self.metric_mode not in ("min", "max"):
            raise ConfigError(f"metric_mode must be 'min' or 'max', got {self.metric_mode!r}.")
        least = {"max_attempts": 1, "keep": 1}
        least |= {"save_every_steps": 0, "initial_delay_s": 0, "monitor_interval_s": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} must be at least {bound}, got {getattr(self, name)}.")
        if self.max_delay_s < self.initial_delay_s:
            raise ConfigError(
                f"max_delay_s ({self.max_delay_s}) is below initial_delay_s "
                f"({self.initial_delay_s})."
            )
        for name in ("attempt_timeout_s", "unreachable_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}.")

    def delay_s(self, attempt: int, jitter: float = 0.0) -> float:
        """Seconds before attempt number `attempt`, from 1; `jitter` in [0, 1] adds up to 25 %."""
        if attempt <= 1:
            return 0.0
        # The jitter keeps clients that lost one server from coming back to it in step.
        delay = min(self.initial_delay_s * 2.0 ** (attempt - 2), self.max_delay_s)
        return delay * (1.0 + 0.25 * jitter)

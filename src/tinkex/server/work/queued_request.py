"""A numbered request of a model, from its acceptance to its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal

from tinkex.engine.jobs import Event, Job, Progress
from tinkex.server.guard.budgets import NOTHING, Reservation
from tinkex.server.work.futures import Promise, is_loading
from tinkex.server.work.operation import Operation
from tinkex.server.workers.suspicion import Suspicion

logger = logging.getLogger(__name__)
Mode = Literal["run", "replay", "skip"]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request under the number that its client gave it, or the mere number where none is run."""

    seq_id: int
    operation: Operation[Any] | None = None
    """None: only the number counts."""
    request_id: str = ""
    body: bytes = b""
    promise: Promise | None = None
    mode: Mode = "run"
    """`replay`: run for its effect on the state only. `skip`: only its number counts."""
    checked: Any = None
    """What the operation's `check` gave on arrival; None: `unpack` gives it again."""
    job: Job | None = None
    """The job under way."""
    suspicion: Suspicion = field(default_factory=Suspicion)
    spilled: bool = False
    """The body is in the journal only, because too many wait; it is read back for its turn."""
    size_bytes: int = 0
    held_bytes: int = 0
    started_at: float = 0.0
    progress: str = ""
    key_id: int | None = None
    """The key it came with."""
    reservation: Reservation = NOTHING
    """Its part of the budgets that hold for it."""
    through_seq: int = -1
    """The last number it stands for: one `skip` covers a whole range. -1: its own only."""

    def __post_init__(self) -> None:
        self.through_seq = max(self.through_seq, self.seq_id)
        self.size_bytes = self.held_bytes = len(self.body)

    @property
    def is_barrier(self) -> bool:
        return self.operation is None or self.operation.is_barrier

    def note(self, event: Event) -> None:
        """The worker says how it gets on."""
        if not isinstance(event, Progress):
            return
        if event.text != self.progress:
            logger.info("%s: %s", self.request_id, event.text)
        self.progress = event.text
        if is_loading(event.text) and self.promise is not None:
            self.promise.polls.wake()  # who waits for a large model wants to see it move

    @property
    def why_given_up(self) -> str:
        advice = "Send fewer or shorter datums at a time."
        return self.suspicion.why_given_up("request", advice)

    def let_go(self) -> None:
        """Keep nothing but the number and what is needed to read the rest back."""
        self.body, self.checked, self.job, self.held_bytes = b"", None, None, 0

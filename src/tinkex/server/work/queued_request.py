"""A numbered request of a model, from its acceptance to its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from tinkex.engine.jobs import Event, Job, Progress
from tinkex.errors import WorkerLostError
from tinkex.server.work.futures import Promise, is_loading
from tinkex.server.work.operation import Operation

logger = logging.getLogger(__name__)
Mode = Literal["run", "replay", "skip"]
MAX_ATTEMPTS = 5
"""A request that was running this many times when its worker died is to blame."""
MAX_MEMORY_DEATHS = 2
"""One whose worker died for lack of memory is run once more, alone: it takes everybody's worker."""


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
    attempts: int = 0
    memory_deaths: int = 0
    """How often its worker died for lack of memory while it ran."""
    runs_alone: bool = False
    """Its worker died by itself while it ran: nobody else's work shares its passes any more."""
    spilled: bool = False
    """The body is in the journal only, because too many wait; it is read back for its turn."""
    size_bytes: int = 0
    held_bytes: int = 0
    started_at: float = 0.0
    progress: str = ""
    key_id: int | None = None
    """The key it came with."""
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

    def note_death(self, loss: WorkerLostError) -> bool:
        """Count a death that is known to come from the work itself; True when it was the last."""
        if not loss.cause:
            return False
        self.runs_alone = True
        self.memory_deaths += loss.cause == "memory"
        # A replay is not given up: without what ran before the state would be another one.
        is_new = self.mode == "run"
        return is_new and loss.was_alone and self.memory_deaths >= MAX_MEMORY_DEATHS

    @property
    def why_given_up(self) -> str:
        if self.memory_deaths:
            return (
                f"The worker ran out of memory {self.memory_deaths} times while it ran this "
                "request, and the kernel ended it; it was given up. Send fewer or shorter datums "
                "at a time."
            )
        return f"The worker died {self.attempts} times while it ran this request; it was given up."

    def let_go(self) -> None:
        """Keep nothing but the number and what is needed to read the rest back."""
        self.body, self.checked, self.job, self.held_bytes = b"", None, None, 0

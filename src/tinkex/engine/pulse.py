"""What an engine's thread is doing, for a watchdog that looks from outside.

The thread says what it works on before it begins (`on_begin` hears of it at once, because a thread
that hangs says nothing more) and counts its turns: a training pass, a decode step, a small job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Beat:
    """One look at an engine."""

    num_turns: int = 0
    is_busy: bool = False
    is_loading: bool = False
    """It loads a base model, which takes as long as it takes."""
    job_ids: tuple[str, ...] = ()
    """Of what it works on; none while it samples, where many share a step."""


class Pulse:
    def __init__(self) -> None:
        self.now = Beat()
        self.on_begin: Callable[[Beat], None] = lambda beat: None

    def turned(self) -> None:
        """Count a turn in the middle of work."""
        self.now = replace(self.now, num_turns=self.now.num_turns + 1)

    @contextmanager
    def work(self, *job_ids: str, is_loading: bool = False) -> Iterator[None]:
        """Say that the thread works on something; work within work is told, then taken back."""
        before = self.now
        self.now = Beat(before.num_turns + 1, True, is_loading, job_ids)
        if job_ids:
            self.on_begin(self.now)
        try:
            yield
        finally:
            self.now = replace(before, num_turns=self.now.num_turns + 1)

"""How often workers were lost while one request or sample ran, and what follows from it.

A loss whose cause is not known counts little: somebody may have killed the worker. A request that
ran when a worker ended by itself or hung is put on trial: it runs alone, one suspect at a time
(`GatedPool.trials`). One that ends a worker twice is given up, since each time it takes a worker
from everybody. What its user waits for after that is `Pauses`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.errors import WorkerLostError

MAX_ATTEMPTS = 5
"""Losses for reasons that nobody knows, after which a request is given up."""
MAX_OWN_DEATHS = 2
"""Losses by lack of memory or by a crash, of which it was alone in the last one."""


@dataclass(slots=True)
class Suspicion:
    attempts: int = 0
    """How often it ran when a worker was lost."""
    memory_deaths: int = 0
    crashes: int = 0
    on_trial: bool = False
    """Nobody else's work shares its passes any more."""

    def note(self, loss: WorkerLostError) -> bool:
        """Count a loss that is known to come from the work itself; True when it was the last."""
        if not loss.cause:
            return False
        self.on_trial = True
        self.memory_deaths += loss.cause == "memory"
        self.crashes += loss.cause == "crash"
        return loss.was_alone and self.memory_deaths + self.crashes >= MAX_OWN_DEATHS

    @property
    def is_hopeless(self) -> bool:
        return self.attempts >= MAX_ATTEMPTS

    def why_given_up(self, work: str, advice: str) -> str:
        """The error text for a client; `work` is what was run."""
        if self.memory_deaths:
            return (
                f"The worker ran out of memory {self.memory_deaths} times while it ran this "
                f"{work}, and the kernel ended it; it was given up. {advice}"
            )
        if self.crashes:
            return (
                f"The worker crashed {self.crashes} times while it ran this {work}; it was given "
                f"up. {advice}"
            )
        return f"The worker died {self.attempts} times while it ran this {work}; it was given up."

"""A member of a pool that has an adapter, while it remembers it."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from tinkex.engine.jobs import Job, Result
from tinkex.server.workers.worker import OnEvent, Worker

Answer = asyncio.Future[Result]


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    member: Worker
    generation: int

    @property
    def is_lost(self) -> bool:
        return not self.member.is_ready or self.member.generation != self.generation

    @property
    def key(self) -> tuple[int, int]:
        """The same for all seats of one life of one member."""
        return id(self.member), self.generation

    def post(self, job: Job, on_event: OnEvent | None = None) -> Answer:
        return self.member.post(job, on_event, generation=self.generation)


def new_id() -> str:
    """For a job of the pool's own."""
    return f"pool-{secrets.token_hex(8)}"


def ignore(answer: Answer) -> None:
    """Nobody waits for how it ends."""
    if not answer.cancelled():
        answer.exception()

"""The messages between the leader of a group and its followers.

The leader's engine decides everything: which job is next, what shares a pass, when samples have
their turn. Before it calls its own trainer or sampler it sends the call to all followers
(`collectives.group.on_every_rank`), and every rank runs the same code; only the collectives in the
middle of a pass wait for others. A call that is made inside of another is made by the followers by
themselves. Between two passes of a training job the leader does other things: its followers take
further calls there, until they are told to `Resume`.

Objects that calls are made on (decoders, trainers, samplers, snapshots) have numbers. Followers
hold an object as long as the leader does.

Nothing may drift apart in silence: with each call travels the number of collectives so far, and
each follower says how the call ended. Where it ended differently, the group ends. A rank without
memory for a pass says so to all (`PassAbandoned`), past whatever they wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SELF = 0
"""The number of the follower itself, which makes all other objects."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a follower: its rank and settings."""

    rank: int
    size: int
    device: str
    exact: bool
    timeout_s: float
    threads: int | None
    log_level: int


@dataclass(frozen=True, slots=True)
class Go:
    """All followers are there: form the group at this file."""

    file: str


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that the follower has under this number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    number: int
    on: int
    method: str
    args: tuple[Any, ...]
    makes: int | None
    """The number that the result is kept under."""
    gone: tuple[int, ...]
    """Objects that the leader has forgotten."""
    num_collectives: int
    """Those that all ranks have taken part in before this call."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with the training job that was interrupted."""


@dataclass(frozen=True, slots=True)
class PassAbandoned:
    """A rank gives up a pass, for want of memory; all form a new process group."""

    num_regroups: int


@dataclass(frozen=True, slots=True)
class CallEnded:
    """How a follower's call ended."""

    number: int
    error: str = ""
    """The kind of an error that was raised, and its text behind a colon."""

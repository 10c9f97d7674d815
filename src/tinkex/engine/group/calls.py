"""What a leader tells its followers: call by call what it does itself.

The leader's engine decides everything: which job is next, what shares a pass, when samples have
their turn. Before it calls its own trainer or sampler it tells all followers to make the same call,
and everyone runs the same code; only the collectives in the middle of a pass (`group`) wait for
others. A call that is made inside of another is made by the followers by themselves. Between two
passes of a training job the leader does other things: its followers take further calls there, until
they are told to `Resume`.

Objects that calls are made on (decoders, trainers, samplers, snapshots) have numbers. Followers
hold an object as long as the leader does.

Nothing may drift apart in silence: with each call travels the number of collectives so far, and
each follower says how the call ended. Where it ended differently, the group ends. A member without
memory for a pass says so to all (`Trouble`), past whatever they wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SELF = 0
"""The number of the member itself, which makes all other objects."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a follower: who it is."""

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

    meeting_place: str


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
    num_meetings: int
    """Collectives that everyone has seen before this call."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with the training job that was interrupted."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member gives up a pass, for want of memory; all meet anew."""

    num_regroups: int


@dataclass(frozen=True, slots=True)
class CallEnded:
    """How a follower's call ended."""

    number: int
    error: str = ""
    """The kind of an error that was raised, and its text behind a colon."""

"""The memory of a recovering client: the calls it made, and the checkpoints that exist.

Bookkeeping only. It decides which checkpoint to start from, which calls to repeat on it, and what
may be forgotten; making calls is for `recovering_client.py`, which also holds the lock around
everything here. Only `_done` is filled and answers are ended without it, by the background loop.

A call stands at a position in the order. A checkpoint holds the effect of all positions before its
own, so a call can be answered from any checkpoint before it, and from none after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex import types
from tinkex.client.futures import APIFuture
from tinkex.client.recovery.policy import RecoveryPolicy

CHANGES_STATE = frozenset(
    """forward_backward forward_backward_custom forward_backward_regularized optim_step load_state
    load_state_with_optimizer""".split()
)


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call, where in the order it stands, and on which run it was made last."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int = 0
    is_ours: bool = False
    """A checkpoint of the recovery's own, which nobody waits for."""
    made: tuple[Any, Any] = (None, None)
    """Its future on a run, and the run; replaced together."""
    answer: APIFuture[Any] = field(default_factory=APIFuture)
    """The caller's future. It ends with a result, an error of the caller's own making, or when
    the caller cancels it: whichever comes first."""
    has_succeeded: bool = False
    """A run did it, whether or not anyone waited for the result."""

    def make_on(self, run: Any) -> APIFuture[Any]:
        """Make the call, or repeat it, on the client of a run."""
        future: APIFuture[Any] = getattr(run, self.method)(*self.args, **self.kwargs)
        return future

    @property
    def is_settled(self) -> bool:
        """True when the call was answered, or its result is here to be."""
        if self.answer.done():
            return True
        future = self.made[0]
        return bool(future.done() and not future.cancelled() and not future.exception())

    @property
    def is_open(self) -> bool:
        """True while someone may still ask for the answer, which is not here."""
        return not (self.is_ours or self.is_settled)

    @property
    def save_name(self) -> Any:
        """The name that a `save_state` was given."""
        return self.args[0] if self.args else self.kwargs.get("name")


@dataclass(frozen=True, slots=True)
class SavedPoint:
    """A checkpoint that exists, and where in the order of calls it stands."""

    path: str
    position: int
    metric: float | None = None
    is_ours: bool = False


class CallLog:
    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self.calls: list[RecordedCall] = []
        self.saved: list[SavedPoint] = []
        self.position = 0
        """Where the next call will stand."""
        self._step_began = 0
        self._forgotten = -1  # calls up to this position are no longer remembered
        self._done: deque[SavedPoint] = deque()

    @property
    def is_exact(self) -> bool:
        """Whether a rebuilt run has to be in the very state in which the lost one was."""
        return self._policy.checkpoint == "latest" and self._policy.repeat_calls

    def add(self, call: RecordedCall) -> None:
        self.calls.append(call)
        self.position += 1
        if call.method == "optim_step":
            self._step_began = self.position

    def drop(self, call: RecordedCall) -> None:
        """Forget a call whose caller was told that it failed, so that it is not repeated."""
        self.calls = [other for other in self.calls if other is not call]

    def watch_save(self, call: RecordedCall, future: Any) -> None:
        """Count the checkpoint in once its future says that it exists."""
        metadata = call.kwargs.get("user_metadata") or {}
        metric = _number(metadata.get(self._policy.metric))

        def saved(done: Any) -> None:
            if not done.cancelled() and done.exception() is None:
                self._done.append(
                    SavedPoint(done.result().path, call.position, metric, call.is_ours)
                )

        future.add_done_callback(saved)

    def take_saves(self) -> list[SavedPoint]:
        """Count in what was finished meanwhile and forget what that makes needless.

        Returns the checkpoints of our own that nobody needs any more.
        """
        if not self._done:
            return []
        while self._done:
            self.saved.append(self._done.popleft())
        self.saved.sort(key=lambda saved: saved.position)
        needed = self._needed()
        self._forgotten = max(self._forgotten, needed)
        # The calls hold the batches: keeping them all would keep the whole training data.
        self.calls = [call for call in self.calls if call.position > needed or call.is_open]
        ours = [saved for saved in self.saved if saved.is_ours]
        best = self._best(ours)
        needless = [
            old
            for old in ours[: -self._policy.keep]
            if old is not best and not (self.is_exact and old.position >= needed)
        ]
        self.saved = [saved for saved in self.saved if saved not in needless]
        return needless

    def _needed(self) -> int:
        """Calls after this position may have to be made again."""
        if not self.is_exact:
            return self._step_began - 1
        # The checkpoint before the last stays a second chance, and so does the one from which
        # calls that still wait for an answer can be made again.
        second = self.saved[-2].position if len(self.saved) > 1 else -1
        return min(second, max((s.position for s in self.saved if self._is_usable(s)), default=-1))

    def _is_usable(self, saved: SavedPoint) -> bool:
        """A checkpoint past a call whose answer never came could not give that answer any more."""
        open_calls = (call.position for call in self.calls if call.is_open)
        return saved.position < min(open_calls, default=self.position)

    def _best(self, saved: Sequence[SavedPoint]) -> SavedPoint | None:
        scored = [(point.metric, point) for point in saved if point.metric is not None]
        if self._policy.checkpoint != "best" or not scored:
            return None
        pick = min if self._policy.metric_mode == "min" else max
        return pick(scored, key=lambda pair: pair[0])[1]

    # -- rebuilding

    def candidates(self, known: Sequence[SavedPoint]) -> list[SavedPoint]:
        """Checkpoints to try, the wanted one first. `known`: all there are, newest first."""
        known = [point for point in known if not self._was_saved_again(point)]
        # The wanted ones first, then any other: an older state is better than none.
        first = [point for point in known if point is self._best(known)]
        if self.is_exact:
            first = [point for point in known if self._is_usable(point)]
        return first + [point for point in known if point not in first]

    def distrusted(self, known: Sequence[SavedPoint]) -> list[str]:
        """Why each rejected checkpoint was rejected."""
        return [
            f"{saved.path} was being saved again and may hold either state: give each save a name "
            "of its own"
            for saved in known
            if self._was_saved_again(saved)
        ]

    def _was_saved_again(self, saved: SavedPoint) -> bool:
        """True when the name was used again later: the checkpoint may hold either state."""
        return any(
            other.position > saved.position and other.path == saved.path for other in self.saved
        ) or any(
            call.position > saved.position
            and call.method == "save_state"
            and saved.path == f"tinker://{call.made[1].model_id}/weights/{call.save_name}"
            for call in self.calls
        )

    def locate(self, listed: Sequence[types.Checkpoint]) -> list[SavedPoint]:
        """The positions of checkpoints that the server lists, newest checkpoint first.

        A save of ours stands where we made it, any other before every call.
        """
        saves = [call for call in self.calls if call.method == "save_state"]
        positions = {call.save_name: call.position for call in reversed(saves)}
        training = [listing for listing in listed if listing.checkpoint_type == "training"]
        return [
            SavedPoint(
                path=listing.tinker_path,
                position=positions.get(listing.tinker_path.rpartition("/")[2], -1),
                metric=_number((listing.user_metadata or {}).get(self._policy.metric)),
            )
            for listing in sorted(training, key=lambda listing: listing.time, reverse=True)
        ]

    def to_repeat(self, saved: SavedPoint) -> list[RecordedCall]:
        """The calls whose effect the checkpoint does not hold, and those still to be answered."""
        # Settled calls that change nothing need no repeat: their answers stand, and cost time.
        if self.is_exact:
            after = [call for call in self.calls if call.position > saved.position]
            return [c for c in after if c.method in CHANGES_STATE or not c.is_settled]
        recent = [c for c in self.calls if c.position >= self._step_began or not c.is_settled]
        # A checkpoint of ours would name a state that is no longer the one it was made for.
        return [call for call in recent if not call.is_ours]

    def num_forgotten(self, saved: SavedPoint) -> int:
        """How many calls after the checkpoint are no longer remembered."""
        return max(0, self._forgotten - saved.position) if self.is_exact else 0


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

"""What each user's work did lately and when, beyond what the journal keeps: passes, samples, 429s.

In memory only: a restart of the server forgets it, and a trace then shows requests alone, which the
journal has. Each user has a ring of their own, so that nobody's work pushes out another's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tinkex.engine.jobs import DeviceTurn
from tinkex.store import Model

MAX_SPANS, MAX_USERS = 5000, 64
"""Of one user; and users, of whom those who did nothing for longest are forgotten first."""
PASSES, SAMPLES, SAMPLES_WAIT = "passes", "samples", "samples wait"
SAMPLE_PARTS, LIMITS = "prefill and decode", "rate limits"
_JOIN_S = 1.0

Details = Mapping[str, str | int | float]


class TimelineSpan(NamedTuple):
    """Something that lasted from one moment to another, in seconds of the epoch."""

    session_id: str
    run_id: str
    """Empty for what is no run's: samples of a base model, refusals."""
    track: str
    name: str
    began_at: float
    ended_at: float
    details: Details


class Timelines:
    """The latest spans of each user. On the event loop only."""

    def __init__(self) -> None:
        self._of_user: OrderedDict[str, deque[TimelineSpan]] = OrderedDict()

    def of_user(self, user_id: str) -> list[TimelineSpan]:
        return list(self._of_user.get(user_id, ()))

    def add(self, user_id: str, spans: Sequence[TimelineSpan]) -> None:
        if spans:
            self._ring(user_id).extend(spans)

    def passed(self, model: Model, request_id: str, turns: Sequence[DeviceTurn]) -> None:
        """Note the passes of a training request."""
        ids = model.session_id, model.model_id
        spans = []
        for name, began_at, ended_at, num_tokens in turns:
            details: Details = {"request_id": request_id, "tokens": num_tokens}
            spans.append(TimelineSpan(*ids, PASSES, name, began_at, ended_at, details))
        self.add(model.user_id, spans)

    def refused(self, user_id: str, route: str, at: float) -> None:
        """Note an answer 429; a burst of them is one span that counts them."""
        ring = self._ring(user_id)
        last = ring[-1] if ring else None
        span = TimelineSpan("", "", LIMITS, f"429 {route}", at, at, {"count": 1})
        if last is not None and last.name == span.name and at - last.ended_at < _JOIN_S:
            ring.pop()
            count = int(last.details["count"]) + 1
            span = last._replace(ended_at=at, details={"count": count})
        ring.append(span)

    def drop_runs(self, user_id: str, run_ids: Sequence[str]) -> None:
        """Forget what was noted of runs that are deleted."""
        if (ring := self._of_user.get(user_id)) is not None:
            kept = [span for span in ring if span.run_id not in run_ids]
            ring.clear()
            ring.extend(kept)

    def _ring(self, user_id: str) -> deque[TimelineSpan]:
        ring = self._of_user.get(user_id)
        if ring is None:
            ring = self._of_user[user_id] = deque(maxlen=MAX_SPANS)
            if len(self._of_user) > MAX_USERS:
                self._of_user.popitem(last=False)
        else:
            self._of_user.move_to_end(user_id)
        return ring

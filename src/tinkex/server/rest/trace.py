"""The life of a session or of one run as a trace that ui.perfetto.dev opens.

Each run has a track of the requests that wait and one of those that run, from the journal; the
passes of the device, samples and rate limits come from the user's timeline. Knows rows and spans,
neither HTTP nor the bytes of the format.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.server.rest.perfetto import Trace, Track
from tinkex.server.runs.timeline import LIMITS, TimelineSpan
from tinkex.store import JournalRow, Model, Session

MAX_REQUESTS = 50_000
"""The newest ones, of a trace."""


def trace_of(
    session: Session,
    models: Sequence[Model],
    ops: Sequence[JournalRow],
    spans: Sequence[TimelineSpan],
) -> bytes:
    """`models` are the runs that are shown; `spans` are what the user's timeline has of them."""
    trace = Trace(session.display_name or session.session_id)
    for op in ops:
        _add_request(trace, op)
    run_ids = {model.model_id for model in models}
    for span in spans:
        track: Track
        # Refusals are the user's: a request that was refused need not have named its session.
        if span.track == LIMITS and span.began_at >= session.created_at:
            track = (LIMITS,)
        elif span.run_id in run_ids:
            track = (span.run_id, span.track)
        elif not span.run_id and span.session_id == session.session_id:
            track = (span.track,)
        else:
            continue
        trace.slice(track, span.name, span.began_at, span.ended_at, span.details)
    return trace.encoded()


def _add_request(trace: Trace, op: JournalRow) -> None:
    waits, runs = (op.model_id, "requests wait"), (op.model_id, "requests")
    details: dict[str, str | int | float] = {"request_id": op.request_id, "seq_id": op.seq_id}
    if op.finished_at is None:
        trace.instant(waits, f"{op.kind} accepted", op.accepted_at, details)
        return
    started_at = op.started_at if op.started_at is not None else op.accepted_at
    trace.slice(waits, op.kind, op.accepted_at, started_at, dict(details))
    waited_ms = round((started_at - op.accepted_at) * 1e3, 3)
    details |= {"state": op.state, "waited_ms": waited_ms}
    if op.error:
        details["error"] = op.error
    trace.slice(runs, op.kind, started_at, op.finished_at, details)

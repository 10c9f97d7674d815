"""A session's life as a trace that Perfetto and chrome://tracing open.

One process per session, one thread per model. Each request is a slice of waiting (accepted to
started) and a slice of running (started to finished). Knows journal rows, not HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tinkex.store import JournalRow, Model, Session

PROCESS = 1


def chrome_trace(
    session: Session, models: Sequence[Model], ops: Sequence[JournalRow]
) -> dict[str, Any]:
    threads = {model.model_id: index + 1 for index, model in enumerate(models)}
    events = list(_names(session, threads))
    for op in ops:
        events.extend(_slices(op, threads[op.model_id]))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"session_id": session.session_id, "num_requests": len(ops)},
    }


def _names(session: Session, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    title = session.display_name or session.session_id
    yield {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": title}}
    for model_id, thread in threads.items():
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": PROCESS,
            "tid": thread,
            "args": {"name": model_id},
        }


def _slices(op: JournalRow, thread: int) -> Iterator[dict[str, Any]]:
    if op.finished_at is None:
        yield _event(op, thread, "i", op.accepted_at, name=f"{op.kind} accepted", s="t")
        return
    started_at = op.started_at if op.started_at is not None else op.accepted_at
    wait_us = (started_at - op.accepted_at) * 1e6
    # Requests of one model wait side by side; async slices may overlap, plain ones may not.
    yield _event(op, thread, "b", op.accepted_at, name=f"{op.kind} waits", id=op.request_id)
    yield _event(op, thread, "e", started_at, name=f"{op.kind} waits", id=op.request_id)
    args = {
        "request_id": op.request_id,
        "seq_id": op.seq_id,
        "state": op.state,
        "waited_ms": round(wait_us / 1e3, 3),
    }
    if op.error:
        args["error"] = op.error
    duration_us = max((op.finished_at - started_at) * 1e6, 0.0)
    yield _event(op, thread, "X", started_at, name=op.kind, dur=duration_us, args=args)


def _event(op: JournalRow, thread: int, phase: str, at: float, **fields: Any) -> dict[str, Any]:
    event = {"ph": phase, "ts": at * 1e6, "pid": PROCESS, "tid": thread, "cat": "training"}
    return event | fields

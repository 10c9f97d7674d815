"""The states of a run, in one vocabulary for the command line, the REST routes and the console."""

from __future__ import annotations

import time
from typing import Any

from tinkex.store import Model, Session

SILENT_S = 120.0
"""A client that was not heard of for so long has left: heartbeats come every ten seconds."""
_ENDED = {"success": "finished", "interrupted": "stopped", "errored": "failed"}


def state_of(
    model: Model, session: Session | None, doing: str, now: float | None = None
) -> tuple[str, str]:
    """The state of a run in a word, and why, where that is worth a word.

    `running`: it computes; `waiting`: it has work and waits for a worker; `idle`: its program is
    there and sends nothing; `finished`, `stopped` (Ctrl-C, or by its owner) and `failed`: how its
    program ended; `lost`: its state could not be restored. `doing` is its work right now.
    """
    if model.corrupted:
        return "lost", "its state could not be restored"
    if doing:
        is_waiting = doing.startswith(("waiting", "restoring", "the worker"))
        return ("waiting" if is_waiting else "running"), doing
    status: dict[str, Any] = session.status if session is not None else {"type": "active"}
    reason = status.get("reason", {}).get("type", "")
    if status["type"] == "client_finished":
        return _ENDED.get(reason, "finished"), str(status.get("detail") or "")[:200]
    if status["type"] == "cancelled":
        return "stopped", str(status.get("detail") or "")[:200]
    if status["type"] != "active":
        return "finished", str(status["type"]).replace("_", " ")
    if model.unloaded:
        return "finished", "unloaded"
    seen = max(model.last_request_time, session.last_heartbeat if session else 0)
    if (time.time() if now is None else now) - seen >= SILENT_S:
        return "finished", "its program ended without saying so"
    return "idle", "waiting for its client"

"""Web addresses of a console, for people to click: the hosted one, or that of a Tinkex server.

`server` is the root of a Tinkex server; without it an address is one of the hosted console.
"""

from __future__ import annotations

from urllib.parse import quote

CONSOLE = "https://tinker.thinkingmachines.ai"


def session_url(session_id: str | None = None, server: str | None = None) -> str:
    """The page of a session; a Tinkex server shows the runs of all of them on one."""
    if server is not None:
        return f"{server}/console"
    return f"{CONSOLE}/sessions/{session_id}" if session_id else f"{CONSOLE}/sessions"


def training_run_url(training_run_id: str, server: str | None = None) -> str:
    """The page of a run."""
    if server is not None:
        return f"{server}/console/runs/{training_run_id}"
    return f"{CONSOLE}/training_runs/{training_run_id}"


def checkpoint_url(training_run_id: str, checkpoint_id: str) -> str:
    """The page of a checkpoint in the hosted console."""
    return f"{CONSOLE}/checkpoints/{training_run_id}/{quote(checkpoint_id, safe='')}"


def playground_url(tinker_path: str) -> str:
    """The hosted playground, with a checkpoint to talk to."""
    return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"

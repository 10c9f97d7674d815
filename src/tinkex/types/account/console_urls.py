"""Web addresses of the hosted console, for people to click."""

from __future__ import annotations

from urllib.parse import quote

CONSOLE = "https://tinker.thinkingmachines.ai"


def session_url(session_id: str | None = None) -> str:
    return f"{CONSOLE}/sessions/{session_id}" if session_id else f"{CONSOLE}/sessions"


def training_run_url(training_run_id: str) -> str:
    return f"{CONSOLE}/training_runs/{training_run_id}"


def checkpoint_url(training_run_id: str, checkpoint_id: str) -> str:
    return f"{CONSOLE}/checkpoints/{training_run_id}/{quote(checkpoint_id, safe='')}"


def playground_url(tinker_path: str) -> str:
    return f"{CONSOLE}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"

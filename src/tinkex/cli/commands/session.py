"""`tinkex session ...`: what a client process did, from its start to its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.arguments import paging_options
from tinkex.cli.downloads import fetch_trace, trace_file
from tinkex.cli.listing import collect
from tinkex.cli.output import Table, ago, properties, size
from tinkex.cli.state import Noun, State, pass_state
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    from tinkex import RestClient
    from tinkex.types import SessionSummary


@click.group(cls=Noun)
def session() -> None:
    """List and inspect sessions."""


@session.command("list")
@paging_options
@pass_state
def list_(state: State, limit: int, offset: int) -> None:
    """List sessions, newest first."""
    with state.rest() as rest:
        ids, _ = collect(rest.list_sessions, "sessions", limit=limit, offset=offset, page=100)
        summaries = _summaries(rest, ids) if state.format != "json" else {}
    state.show(
        Table(
            title=f"Sessions ({len(ids)})",
            columns=("Name", "Status", "Started", "Checkpoints", "Session ID"),
            rows=[(*_words(summaries.get(session_id)), session_id) for session_id in ids],
        ),
        {"sessions": ids},
    )


def _summaries(rest: RestClient, ids: list[str]) -> dict[str, SessionSummary]:
    """Summaries of the newest sessions by id; none where the server has no search."""
    from tinkex import types

    try:
        request = types.SessionSearchRequest(limit=max(1, min(len(ids), 100)))
        sessions = rest.search_sessions(request).result().sessions
    except TinkerError:
        return {}
    return {session.session_id: session for session in sessions}


def _words(session: SessionSummary | None) -> tuple[str, str, str, str]:
    """Name, status, start and number of checkpoints."""
    if session is None:
        return "", "", "", ""
    status = session.status.type if session.status else ""
    reason = getattr(getattr(session.status, "reason", None), "type", "")
    shown = {"client_finished": f"ended: {reason}"}.get(status, status)
    return (
        session.display_name or "",
        shown,
        ago(session.created_at),
        str(session.checkpoints_count or ""),
    )


@session.command()
@click.argument("session_id")
@pass_state
def info(state: State, session_id: str) -> None:
    """Show the runs and samplers of one session."""
    with state.rest() as rest:
        session = rest.get_session(session_id).result()
    shown = {
        "Name": session.display_name,
        "Training Runs": ", ".join(session.training_run_ids) or None,
        "Samplers": ", ".join(session.sampler_ids) or None,
        **{f"Metadata: {key}": value for key, value in (session.user_metadata or {}).items()},
    }
    state.show(properties(f"Session {session_id}", shown), session)


@session.command("export-trace")
@click.argument("session_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it; ./<id>.pftrace by default.",
)
@click.option("--url-only", is_flag=True, help="Print the download URL and fetch nothing.")
@pass_state
def export_trace(state: State, session_id: str, output: Path | None, url_only: bool) -> None:
    """Fetch a session's timeline, to open in ui.perfetto.dev."""
    with state.rest() as rest:
        url = rest.export_session_trace(session_id).result()
    if url_only:
        state.show(url, {"session_id": session_id, "url": url})
        return
    target = output or trace_file(session_id)
    num_bytes = fetch_trace(url, target)
    state.show(
        properties(None, {"Session": session_id, "Destination": target, "Size": size(num_bytes)}),
        {"session_id": session_id, "destination": str(target), "file_size_bytes": num_bytes},
    )

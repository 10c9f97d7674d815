"""Put the console on an application."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse

from tinkex.server.compat.chat_formats import ChatFormats
from tinkex.server.console import launch_pages, pages, playground, run_pages, server_page, shell
from tinkex.server.console.launcher import Launcher
from tinkex.server.console.owners_runs import OwnersRuns
from tinkex.server.console.server_runs import ServerRuns
from tinkex.server.console.source import ConsoleDependencies
from tinkex.server.guard.auth import OPEN_USER
from tinkex.server.http.dependencies import AppDependencies

LOCAL = "local"
"""The address by which programs of this user find the private server."""


def install(app: FastAPI, parts: AppDependencies, chat_formats: ChatFormats) -> None:
    """Mount the pages; sets `console` on `app.state`."""
    runs, launcher = ServerRuns(parts.service, chat_formats), _launcher(parts)
    owners = OwnersRuns(runs, launcher.folder) if launcher is not None else None
    app.state.console = ConsoleDependencies(
        runs,
        parts.auth,
        parts.failed_logins,
        parts.quotas,
        launcher,
        parts.drawing,
        owners,
    )
    if parts.auth.is_open:  # one's own machine: what is sampled here is its user's to see
        parts.service.rollouts.open_to(OPEN_USER)
    for module in (shell, pages, run_pages, playground, launch_pages, server_page):
        app.router.routes += module.router.routes
    # Whoever types the server's address into a browser looks for its pages.
    app.add_api_route("/", _to_the_pages, methods=["GET"], include_in_schema=False)


async def _to_the_pages() -> Response:
    return RedirectResponse("/console", status_code=303)


def _launcher(parts: AppDependencies) -> Launcher | None:
    """For a server of one person on their own machine, private or without keys; else None."""
    config = parts.config
    if config.parent_pid:
        # Its programs find it as every program of its owner does.
        return Launcher(Path.cwd(), {"TINKEX_BASE_URL": LOCAL}, needs_token=False)
    if parts.auth.is_open and config.is_loopback:
        return Launcher(Path.cwd(), {}, needs_token=True)
    return None

"""Put the console on an application."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse

from tinkex.server.compat.chat_formats import ChatFormats
from tinkex.server.console import pages, playground, run_pages, server_page, shell
from tinkex.server.console.server_runs import ServerRuns
from tinkex.server.console.source import ConsoleDependencies
from tinkex.server.guard.auth import OPEN_USER
from tinkex.server.http.dependencies import AppDependencies


def install(app: FastAPI, parts: AppDependencies, chat_formats: ChatFormats) -> None:
    """Mount the pages; sets `console` on `app.state`."""
    runs = ServerRuns(parts.service, chat_formats)
    app.state.console = ConsoleDependencies(runs, parts.auth, parts.failed_logins, parts.quotas)
    if parts.auth.is_open:  # its only user set `keep_rollouts`
        parts.service.rollouts.agree(OPEN_USER, True)
    for module in (shell, pages, run_pages, playground, server_page):
        app.include_router(module.router)
    # Whoever types the server's address into a browser looks for its pages.
    app.add_api_route("/", _to_the_pages, methods=["GET"], include_in_schema=False)


async def _to_the_pages() -> Response:
    return RedirectResponse("/console", status_code=303)

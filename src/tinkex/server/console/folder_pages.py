"""The same pages over folders of this disk, without a server: `tinkex console --log-dir runs/`.

Listens on loopback. Other users of the machine can reach that too, so the pages are seen only with
the secret that stands in the printed link. They show; there is nothing to change.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse

from tinkex.server.console import launch_pages, run_pages, shell
from tinkex.server.console.folder_runs import FolderRuns
from tinkex.server.console.launcher import Launcher
from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.source import ConsoleDependencies, console_of
from tinkex.server.console.visitors import leave_cookie
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.origin import check_same_site
from tinkex.server.process import problems
from tinkex.server.process.problems import ApiError
from tinkex.store import User

router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)


class LinkAuth:
    """Whoever has the link is the one who started this."""

    is_open = False

    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def user_of(self, credential: str | None) -> User:
        if not hmac.compare_digest((credential or "").encode(), self._secret.encode()):
            raise ApiError(401, "Open the link that `tinkex console` printed.")
        return User(user_id="", name="", email="", created_at=0.0)

    async def is_admin(self, credential: str | None) -> bool:
        return False


@router.get("/enter")
async def enter(request: Request, token: Annotated[str, Query(max_length=200)]) -> Response:
    check_same_site(request.headers)
    response = RedirectResponse("/console", status_code=303)
    await console_of(request).auth.user_of(token)
    leave_cookie(request, response, token, max_age_s=None)
    return response


@router.get("/login")
async def login(request: Request) -> Response:
    text = "Open the link that tinkex console printed: it lets you in."
    return page(request, "failure.html", None, 401, message=text)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.console.launcher.close()


def create_app(root: Path, secret: str) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan)
    # Whoever has the link started this console: commands run where it was started, in their name.
    launcher = Launcher(Path.cwd(), {}, needs_token=False)
    app.state.console = ConsoleDependencies(
        FolderRuns(root), LinkAuth(secret), FailedLogins(), launcher=launcher
    )
    for module in (shell, run_pages, launch_pages):
        app.router.routes += module.router.routes
    app.router.routes += router.routes
    problems.install(app)
    return app


class LocalConsole:
    """A listening server. `run` blocks until Ctrl-C."""

    def __init__(self, root: Path, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self._secret = secrets.token_urlsafe(24)
        self._app = create_app(root, self._secret)

    @property
    def link(self) -> str:
        port = self._socket.getsockname()[1]
        return f"http://127.0.0.1:{port}/console/enter?token={self._secret}"

    def run(self) -> None:
        config = uvicorn.Config(
            self._app, access_log=False, log_level="warning", timeout_graceful_shutdown=1
        )
        uvicorn.Server(config).run(sockets=[self._socket])

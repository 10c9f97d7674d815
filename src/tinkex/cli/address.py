"""The server a command talks to, as a plain URL and key, for commands that speak raw HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.state import State

if TYPE_CHECKING:
    import httpx


@contextlib.contextmanager
def resolve_address(state: State) -> Iterator[tuple[str, str]]:
    """(base URL, key) of the configured server; the embedded one is started and left again."""
    from tinkex.client.config import LOCAL, ClientConfig
    from tinkex.client.credentials import run_credential_command

    config = ClientConfig.from_env(base_url=state.base_url)
    # A credential command is the client's way to get a short-lived key; raw HTTP needs it as well.
    key = config.api_key or run_credential_command(config.credential_cmd or "")
    if config.base_url != LOCAL:
        yield config.base_url, key
        return
    from tinkex.client.session.embedded_server import join_local_server

    server = join_local_server(is_private=config.is_private)
    try:
        yield server.base_url, server.api_key
    finally:
        asyncio.run(server.leave())


def send(
    verb: str, base_url: str, path: str, key: str, *, timeout: float = 30, **options: Any
) -> httpx.Response:
    """Send a request and give the answer, whatever its status.

    Raises:
        click.ClickException: The server cannot be reached.
    """
    import httpx

    from tinkex.client.http.backends import tls_trouble, unreadable_certificates
    from tinkex.wire.loopback import DIRECT

    headers = {"X-API-Key": key, **options.pop("headers", {})}
    try:
        has_tls = base_url.startswith("https")
        client = httpx.Client(headers=headers, timeout=timeout, mounts=DIRECT, verify=has_tls)
    except OSError as exc:
        raise click.ClickException(str(unreadable_certificates(exc))) from exc
    try:
        with client:
            return client.request(verb, base_url + path, **options)
    except httpx.HTTPError as exc:
        if (trouble := tls_trouble(base_url, exc)) is not None:
            raise click.ClickException(str(trouble)) from exc
        raise click.ClickException(f"Could not reach {base_url}: {exc}") from exc


def detail_of(answer: httpx.Response) -> str:
    """Why a server refused, in its own words where it has some."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    body = body if isinstance(body, dict) else {}
    error = body.get("error")  # the routes of OpenAI's protocol
    detail = error.get("message") if isinstance(error, dict) else body.get("detail")
    if isinstance(detail, str):
        return detail
    return f"HTTP {answer.status_code}: {answer.text[:200]}".removesuffix(": ")

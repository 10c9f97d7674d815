"""`tinkex auth ...`: the key on this machine, and whether the server takes it.

The key file is the one the official CLI uses, so logging in with either serves both. The key is
read without echo, checked against the server before it is stored, and never printed.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import click

from tinkex.cli.address import detail_of, resolve_address, send
from tinkex.cli.messages import words
from tinkex.cli.output import print_json, properties
from tinkex.cli.state import Noun, State, pass_state
from tinkex.errors import TinkerError
from tinkex.types.account.console_urls import CONSOLE

_KEYS_PAGE = f"{CONSOLE}/keys"


@click.group(cls=Noun)
def auth() -> None:
    """Log in, log out, and say who you are."""


@auth.command()
@pass_state
def login(state: State) -> None:
    """Store an API key as this machine's default, after the server has accepted it."""
    from tinkex.client import credentials

    if credentials.load_default_key() is not None:
        raise click.ClickException("Already logged in. Run `tinkex auth logout` first.")
    url = f"{_KEYS_PAGE}?new_key=true&key_name=tinker-cli-{platform.node()}"
    key = _ask_for_key(state, url)
    me = _me("GET", _base_url(state), key)
    entry: dict[str, Any] = {k: v for k, v in me.items() if k in ("name", "note", "details")}
    credentials.store_default_key(str(me["key_id"]), {"type": "manual", "key": key, **entry})
    click.echo(f"Logged in as {me['details']['user_details']['email']}.")


def _ask_for_key(state: State, url: str) -> str:
    if sys.stdin.isatty():
        state.note(f"Create a key at {_link(url)}")
        return str(click.prompt("API key", hide_input=True, err=True)).strip()
    key = sys.stdin.readline().strip()
    if not key:
        raise click.ClickException(
            f"No key on stdin. Create one at {url} and log in on a terminal, or pipe it in: "
            "`tinkex auth login < key.txt`."
        )
    return key


@auth.command()
@pass_state
def logout(state: State) -> None:
    """Forget the default key. A key that a login generated is revoked as well."""
    from tinkex.client import credentials

    stored = credentials.load_credentials()
    entry = stored.get("keys", {}).get(str(stored.get("default")))
    if entry is None:
        raise click.ClickException("Not logged in: there is no stored key.")
    if entry.get("type") == "generated":
        _me("DELETE", _base_url(state), entry["key"])
    credentials.delete_default_key()
    click.echo("Logged out.")
    if entry.get("type") != "generated":
        state.note(f"The key itself still works; revoke it at {_link(_KEYS_PAGE)}")


@auth.command()
@pass_state
def status(state: State) -> None:
    """Say whether there are credentials, and whether the server accepts them."""
    from tinkex import auth as credentials

    available = credentials.tinker_has_credentials()
    reason = ""
    try:
        with state.service(patient=False) as service:
            service.get_server_capabilities()
    except TinkerError as exc:
        reason = words(exc)
    needless = not available and not reason and _is_local(state)
    if state.format == "json":
        facts = {"credentials": available, "needs_credentials": not needless}
        print_json({**facts, "accessible": not reason, "reason": reason or None})
        if reason:
            raise click.exceptions.Exit(1)
    else:
        answer = "yes" if available else "no (this server needs none)" if needless else "no"
        click.echo(f"Credentials available: {answer}")
        click.echo(f"Tinker accessible: {'no' if reason else 'yes'}")
    if reason:
        raise click.ClickException(reason)
    if not available and not needless:
        raise click.exceptions.Exit(1)


def _is_local(state: State) -> bool:
    from tinkex.client.config import ClientConfig

    try:
        return ClientConfig.from_env(base_url=state.base_url).is_local
    except TinkerError:
        return False


@auth.command()
@pass_state
def whoami(state: State) -> None:
    """Show the user and organization the server sees."""
    claims = _claims(state)
    me = {
        "user_urn": claims.get("sub"),
        "org_urn": f"tml:organization:{claims.get('org_id')}",
        "email": claims.get("email") or None,
    }
    state.show(
        properties(
            None, {"Email": me["email"], "User": me["user_urn"], "Organization": me["org_urn"]}
        ),
        me,
    )


def _claims(state: State) -> dict[str, Any]:
    """The claims of a token that the server gives for our key: user, organization, e-mail."""
    from tinkex.client.credentials import jwt_claims

    with resolve_address(state) as (base_url, key):
        if key.startswith("eyJ"):  # A JWT already: every one begins with {" in base64.
            return jwt_claims(key)
        answer = send("POST", base_url, "/api/v1/auth/token", key, json={})
    if answer.is_error:
        raise click.ClickException(f"The server does not say who you are: {detail_of(answer)}")
    return jwt_claims(str(answer.json().get("jwt", "")))


def _base_url(state: State) -> str:
    """The server that keys belong to: the hosted one unless another is named."""
    from tinkex.client.config import HOSTED_BASE_URL, LOCAL

    url = (state.base_url or os.environ.get("TINKER_BASE_URL") or HOSTED_BASE_URL).rstrip("/")
    if url == LOCAL:
        raise click.UsageError("The local server needs no key. Name a server with --base-url.")
    return url


def _link(url: str) -> str:
    """An OSC-8 link: terminals that know it make it clickable, others show the URL."""
    if not sys.stderr.isatty():
        return url
    return f"\033]8;;{url}\033\\{url}\033]8;;\033\\"


def _me(verb: str, base_url: str, key: str) -> dict[str, Any]:
    """Ask the server about a key, or revoke it. Its own words (`detail`) are the error."""
    answer = send(verb, base_url, "/api/v1/auth/apikey/me", key)
    if answer.is_error:
        raise click.ClickException(f"The server refused the key: {detail_of(answer)}")
    return dict(answer.json()) if verb == "GET" else {}

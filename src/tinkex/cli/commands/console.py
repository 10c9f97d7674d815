"""`tinkex console`: open the server's pages in a browser."""

from __future__ import annotations

import contextlib
import threading
from urllib.parse import quote

import click

from tinkex.cli.address import resolve_address
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@pass_state
def console(state: State, no_browser: bool) -> None:
    """Show runs, curves and checkpoints in a browser.

    Without a server of your own, the private one of this machine is started; it stays until you
    press Ctrl-C here. The printed link logs in by itself and is good for an hour: keep it to
    yourself.
    """
    with resolve_address(state) as (base_url, key):
        click.echo(_link(base_url, key))
        if no_browser:
            return
        import webbrowser

        webbrowser.open(_link(base_url, key))
        state.note("Press Ctrl-C to end.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _link(base_url: str, key: str) -> str:
    """The console's address, with a token of an hour where a key is needed."""
    import httpx

    if not key:
        return f"{base_url}/console"
    answer = httpx.post(f"{base_url}/api/v1/auth/token", headers={"X-API-Key": key}, timeout=30)
    if answer.status_code != 200:
        raise click.ClickException(f"{base_url} does not take the key: {answer.text[:200]}")
    return f"{base_url}/console/enter?token={quote(answer.json()['jwt'])}"

"""`tinkex console`: open the server's pages in a browser."""

from __future__ import annotations

import contextlib
import threading
import webbrowser
from pathlib import Path
from urllib.parse import quote

import click

from tinkex.cli.address import resolve_address, send
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="Show the run folders under this one, and ask no server.",
)
@click.option("--port", type=int, default=0, help="Port for --log-dir; any free one by default.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@pass_state
def console(state: State, log_dir: Path | None, port: int, no_browser: bool) -> None:
    """Show runs, curves and checkpoints in a browser.

    Without a server of your own, the private one of this machine is started; it stays until you
    press Ctrl-C here. The printed link logs in by itself and is good for an hour: keep it to
    yourself. With --log-dir no server is asked: every folder with a metrics.jsonl is a run, ours
    or tinker-cookbook's, wherever it was trained.
    """
    if log_dir is not None:
        _show_folders(state, log_dir, port, no_browser)
        return
    with resolve_address(state) as (base_url, key):
        click.echo(_link(base_url, key))
        if no_browser:
            return
        webbrowser.open(_link(base_url, key))
        state.note("Press Ctrl-C to end.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


def _show_folders(state: State, log_dir: Path, port: int, no_browser: bool) -> None:
    from tinkex.server.console.folder_pages import LocalConsole

    if not log_dir.is_dir():
        raise click.ClickException(f"There is no folder {log_dir}.")
    try:
        local = LocalConsole(log_dir, port)
    except (OSError, OverflowError) as exc:
        raise click.ClickException(f"cannot listen on 127.0.0.1:{port}: {exc}") from exc
    click.echo(local.link)
    state.note("Press Ctrl-C to end.")
    if not no_browser:
        webbrowser.open(local.link)
    local.run()


def _link(base_url: str, key: str) -> str:
    """The console's address: for a server of one's own as its owner, else with an hour's token."""
    owner = _owner_token(base_url)
    # A server that got a key since wants a login, whoever started it.
    if owner and send("GET", base_url, "/console", "").status_code == 200:
        return f"{base_url}/console/owner?token={quote(owner)}"
    if not key:
        return f"{base_url}/console"
    answer = send("POST", base_url, "/api/v1/auth/token", key)
    if answer.status_code != 200:
        raise click.ClickException(f"{base_url} does not take the key: {answer.text[:200]}")
    return f"{base_url}/console/enter?token={quote(answer.json()['jwt'])}"


def _owner_token(base_url: str) -> str:
    """The token of a server without keys that this user started; with it runs can be started."""
    from tinkex.wire.local_servers import living_servers

    tokens = (r.get("owner_token") for r in living_servers() if r.get("base_url") == base_url)
    return next((token for token in tokens if isinstance(token, str)), "")

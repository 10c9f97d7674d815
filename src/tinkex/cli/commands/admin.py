"""`tinkex admin ...`: look after the data of a server of your own.

Works on the server's data folder, so it needs its machine and no key. `backup` and `fsck` may run
beside the server, `restore` makes a new folder, `vacuum` wants the server stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import properties
from tinkex.cli.state import Noun, State, pass_state

if TYPE_CHECKING:
    from tinkex.server.files.backup import Found

_FOLDER = click.Path(path_type=Path)


@click.group(cls=Noun)
def admin() -> None:
    """Back up, restore, check and shrink the data of your own server."""


@admin.command()
@click.option("--data-dir", type=_FOLDER, help="Data folder of the server.")
@click.option("--output", type=_FOLDER, required=True, help="Tar file to write; must not exist.")
@pass_state
def backup(state: State, /, data_dir: Path | None, output: Path) -> None:
    """Copy database, checkpoints, state and secrets into one tar; the server may run."""
    from tinkex.server.files import backup as files

    found = files.backup(_data_dir(data_dir), output)
    _show(state, found, {"Backup": str(output), "Bytes": output.stat().st_size})


@admin.command()
@click.option("--input", "source", type=_FOLDER, required=True, help="Tar file of a backup.")
@click.option("--data-dir", type=_FOLDER, required=True, help="New or empty folder to fill.")
@pass_state
def restore(state: State, /, source: Path, data_dir: Path) -> None:
    """Unpack a backup into a new data folder and check it."""
    from tinkex.server.files import backup as files

    _show(state, files.restore(source, data_dir), {"Data folder": str(data_dir)})


@admin.command()
@click.option("--data-dir", type=_FOLDER, help="Data folder of the server.")
@pass_state
def fsck(state: State, /, data_dir: Path | None) -> None:
    """Hold the data folder against its database; exits 1 when something is missing."""
    from tinkex.server.files import backup as files

    folder = _data_dir(data_dir)
    _show(state, files.check(folder), {"Data folder": str(folder)})


@admin.command()
@click.option("--data-dir", type=_FOLDER, help="Data folder of the server.")
@pass_state
def vacuum(state: State, /, data_dir: Path | None) -> None:
    """Give unused room of the database back to the disk; stop the server first."""
    from tinkex.server.files import backup as files

    before, after = files.vacuum(_data_dir(data_dir))
    facts = {"Bytes before": before, "Bytes after": after}
    state.show(properties(None, facts), {"before_bytes": before, "after_bytes": after})


def _data_dir(given: Path | None) -> Path:
    from tinkex.server.config import load_config

    flags: dict[str, Any] = {} if given is None else {"data_dir": given}
    return load_config(flags=flags).data_dir


def _show(state: State, found: Found, facts: dict[str, Any]) -> None:
    facts |= {"Listed folders": found.num_listed, "Missing": len(found.missing)}
    if found.num_stored:
        facts["In the object store"] = found.num_stored
    facts |= {"Not listed": len(found.strays), "Problems": "; ".join(found.problems) or "none"}
    body = {
        "num_listed": found.num_listed,
        "missing": found.missing,
        "num_stored": found.num_stored,
        "strays": found.strays,
        "problems": found.problems,
        "ok": found.ok,
    }
    state.show(properties(None, facts), body)
    if not found.ok:
        raise click.exceptions.Exit(1)

"""`tinkex version`: one line that a script can read."""

from __future__ import annotations

import click

from tinkex import __version__
from tinkex.cli.state import Leaf


@click.command(cls=Leaf)
def version() -> None:
    """Print the version."""
    click.echo(f"tinkex {__version__}")

"""`tinkex version`: one line that a script can read."""

from __future__ import annotations

import click

from tinkex import __version__
from tinkex.cli.output import print_json
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@pass_state
def version(state: State) -> None:
    """Print the version."""
    if state.format == "json":
        print_json({"version": __version__})
    else:
        click.echo(f"tinkex {__version__}")

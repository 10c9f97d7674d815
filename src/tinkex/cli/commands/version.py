"""`tinkex version`: one line that a script can read."""

from __future__ import annotations

import click

from tinkex import __version__
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@pass_state
def version(state: State) -> None:
    """Print the version."""
    state.show(f"tinkex {__version__}", {"version": __version__})

"""`tinkex version` and `tinkex completion SHELL`: what a shell asks of a program."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tinkex import __version__
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@pass_state
def version(state: State) -> None:
    """Print the version."""
    state.show(f"tinkex {__version__}", {"version": __version__})


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    bash: add `eval "$(tinkex completion bash)"` to ~/.bashrc; zsh alike; fish: pipe it to `source`.
    """
    complete = get_completion_class(shell)
    assert complete is not None
    root = ctx.find_root().command
    script = complete(root, {}, "tinkex", "_TINKEX_COMPLETE").source()
    if shell == "bash":  # else the colons of a checkpoint's path end a word
        script = f"COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}\n{script}"
    click.echo(script)

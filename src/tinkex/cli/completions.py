"""What the shell offers after TAB: runs, checkpoints, models and files.

Runs and models come from the files of this machine, checkpoints from the server, or from the
private server's database, as TAB starts no server. A failure offers nothing rather than printing
something into the prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import click
from click.shell_completion import CompletionItem

__all__ = ["complete_checkpoint", "complete_model", "complete_run"]


def complete_run(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of runs, else files and folders."""
    return _items(_runs(), incomplete) or [CompletionItem(incomplete, type="dir")]


def complete_checkpoint(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Checkpoints of the server."""
    return _items(_checkpoints(), incomplete)


def complete_model(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Runs by name, base models of this machine, checkpoints, folders."""
    if incomplete.startswith("tinker:"):
        return _items(_checkpoints(), incomplete)
    items = _items((*_runs(), *_models()), incomplete)
    return items or [CompletionItem(incomplete, type="dir")]


def _items(names: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    """The names that go on from what was typed, each with its explanation."""
    return [CompletionItem(name, help=text) for name, text in names if name.startswith(incomplete)]


def _runs() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(Exception):
        from tinkex.runs.names import known

        for run in known():
            yield run.name, f"{run.recipe}, {run.step} steps"


def _models() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(Exception):
        from tinkex.contract.models import DEFAULT_MODEL
        from tinkex.engine.model.base_model import cached_names

        yield DEFAULT_MODEL, "the default model"
        for name in cached_names():
            yield name, "on this machine"


def _checkpoints() -> Iterator[tuple[str, str]]:
    """The newest checkpoints; a private server's are read from its files: TAB starts no server."""
    with contextlib.suppress(Exception):
        from tinkex.cli.state import State
        from tinkex.client.config import LOCAL
        from tinkex.wire.local_servers import private_data_folder

        state = State()
        if state.config(patient=False).base_url == LOCAL:
            from tinkex.server.administration.disk_usage import checkpoint_paths

            yield from checkpoint_paths(private_data_folder(), limit=100)
            return
        with state.rest() as rest:
            for checkpoint in rest.list_user_checkpoints(limit=100).result().checkpoints:
                yield checkpoint.tinker_path, checkpoint.checkpoint_type

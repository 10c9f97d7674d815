"""Options and arguments that several commands take, with the checks that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from tinkex.cli.completions import complete_model

F = TypeVar("F", bound=Callable[..., Any])


def paging_options(command: F) -> F:
    """`--limit N`, where 0 means all, and `--offset N`."""
    number: Any = {"type": click.IntRange(min=0), "show_default": True}
    command = click.option("--offset", default=0, help="Rows to skip first.", **number)(command)
    text = "Most rows to show; 0 shows all."
    return click.option("--limit", default=20, help=text, **number)(command)


run_or_path_argument = click.argument("path", shell_complete=complete_model)


def read_iso_time(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Read an ISO date or time; without a zone it is UTC (a click callback)."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"'{value}' is not an ISO date such as 2026-11-15 or 2026-11-15T08:00Z."
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def near_runs(text: str, of_server: Iterable[str] = ()) -> str:
    """A sentence with the names near to `text`, else with the runs here; empty without any.

    The names are those of log folders on this machine, and those that a server knows.
    """
    import difflib

    from tinkex.runs.names import known

    names = list(dict.fromkeys([*(run.name for run in known()), *of_server]))
    if near := difflib.get_close_matches(text, names, n=3, cutoff=0.5):
        return f" Did you mean {' or '.join(near)}?"
    return f" Runs here: {', '.join(names[:10])}." if names else ""

"""Options and arguments that several commands take, with the checks that go with them."""

from __future__ import annotations

from collections.abc import Callable
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


def known_runs() -> str:
    """The names of the runs on this machine, for people who missed one."""
    from tinkex.runs.names import known

    return ", ".join(run.name for run in known()) or "none"


def near_runs(text: str) -> str:
    """A sentence with the runs whose names are near to `text`, or with all; empty without any."""
    import difflib

    from tinkex.runs.names import known

    names = [run.name for run in known()]
    if near := difflib.get_close_matches(text, names, n=3, cutoff=0.5):
        return f" Did you mean {' or '.join(near)}?"
    return f" Runs here: {', '.join(names[:10])}." if names else ""

"""Options and arguments that several commands take, with the checks that go with them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.completions import complete_checkpoint, complete_model

F = TypeVar("F", bound=Callable[..., Any])


def limit_option(default: int) -> Callable[[F], F]:
    """`--limit N`, where 0 means all."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        help="Most rows to show; 0 shows all.",
    )


def offset_option() -> Callable[[F], F]:
    return click.option(
        "--offset",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Rows to skip first.",
    )


def check_tinker_path(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A click callback: every given path must be a tinker:// one."""
    for path in value if isinstance(value, tuple) else (value,):
        if path is not None and not path.startswith("tinker://"):
            raise click.BadParameter(
                f"'{path}' is not a checkpoint; one looks like tinker://RUN/weights/NAME."
            )
    return value


def check_run_or_path(ctx: click.Context, param: click.Parameter, value: str) -> Any:
    """A click callback: a run's name or folder stands for its checkpoint."""
    path = named(value) or ""
    if not path.startswith("tinker://"):
        raise click.BadParameter(
            f"'{value}' is neither a checkpoint, which looks like tinker://RUN/weights/NAME, nor a "
            f"run here; runs: {known_runs()}."
        )
    return path


path_argument = click.argument(
    "path", callback=check_tinker_path, shell_complete=complete_checkpoint
)
run_or_path_argument = click.argument(
    "path", callback=check_run_or_path, shell_complete=complete_model
)


if TYPE_CHECKING:
    _Moment = click.ParamType[datetime]
else:  # Generic only since click 8.4.
    _Moment = click.ParamType


class IsoMoment(_Moment):
    """An ISO date or time; without a zone it is UTC."""

    name = "ISO"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"'{value}' is not an ISO date such as 2026-11-15 or 2026-11-15T08:00Z.")
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def known_runs() -> str:
    """The names of the runs on this machine, for people who missed one."""
    from tinkex.runs.names import known

    return ", ".join(run.name for run in known()) or "none"


def named(model: str | None) -> str | None:
    """A run's name or folder as its checkpoint; everything else as it is."""
    if model is None:
        return None
    from tinkex.runs.names import find_path

    return find_path(model) or model

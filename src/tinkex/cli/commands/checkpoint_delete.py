"""`tinkex checkpoint delete`: by path, or by run with filters, many at a time.

A checkpoint that cannot be deleted is reported beside those that could; one failure never stops
the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING

import click

from tinkex.cli.arguments import read_iso_time
from tinkex.cli.completions import complete_checkpoint
from tinkex.cli.messages import words
from tinkex.cli.names import resolve_checkpoint, run_of
from tinkex.cli.state import Leaf, State, pass_state
from tinkex.types.account.checkpoints import is_tinker_path

if TYPE_CHECKING:
    from tinkex import RestClient
    from tinkex.types import Checkpoint

_PARALLEL = 32
# The kind as it stands in a path, or as listings call it.
_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
    "training": "training",
    "sampler": "sampler",
    "external": "external",
}


@click.command(cls=Leaf)
@click.argument("paths", nargs=-1, shell_complete=complete_checkpoint)
@click.option("--run-id", help="Delete those of this run, by its id or name, instead.")
@click.option("--type", "kind", type=click.Choice(list(_TYPES)), help="Only this kind.")
@click.option("--before", metavar="ISO", callback=read_iso_time, help="Only those made before.")
@click.option("--after", metavar="ISO", callback=read_iso_time, help="Only those made after.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@pass_state
def delete(
    state: State,
    paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints, by PATHS or their short names, or by --run-id. This cannot be undone."""
    if bool(paths) == bool(run_id):
        raise click.UsageError("Name checkpoints to delete, or give --run-id; one of the two.")
    if paths and (kind or before or after):
        raise click.UsageError("--type, --before and --after filter a run: give --run-id.")
    if run_id:
        run_id = run_of(state, run_id)
    else:
        resolve_checkpoint(state, paths[0])  # its server
    with state.rest() as rest:
        paths = _named(rest, paths)
        if run_id:
            items = rest.list_checkpoints(run_id).result().checkpoints
            paths = tuple(item.tinker_path for item in items if _wanted(item, kind, before, after))
        if paths and not yes:
            click.confirm(f"Delete {len(paths)} checkpoint(s) for good?", abort=True, err=True)
        failed = _delete_all(rest, paths)
    _report(state, len(paths) - len(failed), failed)


def _named(rest: RestClient, paths: Sequence[str]) -> tuple[str, ...]:
    """Paths and short names as paths. A run's name would delete less than it says."""
    if all(map(is_tinker_path, paths)):
        return tuple(paths)
    known = {named.name: named.path for named in rest.list_checkpoint_names().result().names}
    for path in paths:
        if path not in known and not is_tinker_path(path):
            raise click.ClickException(
                f"{path!r} is neither a checkpoint's path nor a short name of one. For all "
                f"checkpoints of a run: --run-id {path}."
            )
    return tuple(known.get(path, path) for path in paths)


def _wanted(
    item: Checkpoint, kind: str | None, before: datetime | None, after: datetime | None
) -> bool:
    return (
        (kind is None or item.checkpoint_type == _TYPES[kind])
        and (before is None or item.time < before)
        and (after is None or item.time > after)
    )


def _delete_all(rest: RestClient, paths: Sequence[str]) -> list[dict[str, str]]:
    def attempt(path: str) -> dict[str, str] | None:
        try:
            rest.delete_checkpoint_from_tinker_path(path).result()
        except Exception as exc:
            return {"tinker_path": path, "error": words(exc)}
        return None

    with ThreadPoolExecutor(_PARALLEL) as pool:
        return [failure for failure in pool.map(attempt, paths) if failure]


def _report(state: State, num_deleted: int, failed: list[dict[str, str]]) -> None:
    if state.format == "json":
        click.echo(json.dumps({"deleted_count": num_deleted, "failed": failed}))
    else:
        click.echo(f"Deleted {num_deleted} checkpoint(s)")
        for failure in failed:
            state.note(f"Failed: {failure['tinker_path']}: {failure['error']}")
    if failed:
        raise click.exceptions.Exit(1)

"""`tinkex disk` and `tinkex gc`: what Tinkex keeps on this machine, and clearing it away.

Both work on the data folders of this user's servers (the private one and that of `tinkex serve`),
without a key and without starting a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import Table, ago, print_table, size
from tinkex.cli.state import Leaf, State, pass_state

if TYPE_CHECKING:
    from tinkex.server.administration.disk_usage import Cleared, DiskUsage, RunDiskUsage

_FOLDER = click.Path(path_type=Path)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d+)([smhdw])")


def _age(ctx: click.Context, param: click.Parameter, value: str) -> float:
    if (match := _AGE.fullmatch(value)) is None:
        raise click.BadParameter(f"'{value}' is no age; write 30m, 12h, 7d or 2w.")
    return float(int(match[1]) * _UNITS[match[2]])


@click.command(cls=Leaf)
@click.option("--data-dir", type=_FOLDER, help="Only this data folder.")
@click.option("--all", "show_all", is_flag=True, help="Every run, not only the ten largest.")
@pass_state
def disk(state: State, data_dir: Path | None, show_all: bool) -> None:
    """Show what Tinkex keeps on this machine: by run, with age, and the models it fetched."""
    from tinkex.server.administration.disk_usage import disk_usage

    held = {folder: disk_usage(folder) for folder in _data_folders(data_dir)}
    models = {} if data_dir else dict(_fetched_models())
    state.show(lambda: _print(state, held, models, show_all), _as_data(held, models))


def _print(
    state: State, found: dict[Path, DiskUsage], models: dict[Path, int], show_all: bool
) -> None:
    for folder, held in found.items():
        print_table(_runs_table(folder, held, show_all))
    if models:
        rows = [(path.name, size(num_bytes)) for path, num_bytes in models.items()]
        title = f"Models in {next(iter(models)).parent}"
        print_table(Table(title=title, columns=("Model", "Size"), rows=rows))
    total = sum(held.total for held in found.values()) + sum(models.values())
    click.echo(f"Total {size(total)}.")
    for command, older_than_s in (("gc", 3600.0), ("gc --older-than 0m", 0.0)):
        spare = sum(_would_go(held, older_than_s, "")[1] for held in found.values())
        if spare > 1 << 20:
            state.note(f"`tinkex {command}` frees about {size(spare)}; named checkpoints stay.")
            break


@click.command(cls=Leaf)
@click.option(
    "--older-than",
    "older_than_s",
    default="1h",
    show_default=True,
    metavar="AGE",
    callback=_age,
    help="Only runs unused for this long: 30m, 12h, 7d.",
)
@click.option(
    "--run", "run_id", default="", help="All of this run (its id or name), its checkpoints too."
)
@click.option("--data-dir", type=_FOLDER, help="Only this data folder.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a run's checkpoints go.")
@pass_state
def gc(
    state: State,
    older_than_s: float,
    run_id: str,
    data_dir: Path | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove what nobody needs: recovery state of unused runs, unnamed weights, leftovers.

    Checkpoints with a name stay, unless --run names their run.
    """
    from tinkex.server.administration.disk_usage import disk_usage
    from tinkex.store.claim import InUseError

    folders = list(_data_folders(data_dir))
    if run_id:
        folder, run_id = _one_run(folders, run_id)
        folders = [folder]
        if not (yes or dry_run):
            click.confirm(f"Remove all of {run_id}, its checkpoints too?", abort=True, err=True)
    report, in_use = [], []
    for folder in folders:
        try:
            if dry_run:
                num_runs, num_bytes = _would_go(disk_usage(folder), older_than_s, run_id)
            else:
                done = _cleared(state, folder, older_than_s, run_id)
                num_runs, num_bytes = done.num_runs, done.num_bytes
        except InUseError:
            in_use.append(
                f"A running server uses {folder}; nothing is removed there. Stop it, and run "
                "`tinkex gc` again."
            )
            continue
        report.append({"folder": str(folder), "runs": num_runs, "bytes": num_bytes})
    if in_use and not report:
        raise click.ClickException("\n".join(in_use))
    for text in in_use:
        state.note(text)
    title = "Would remove" if dry_run else "Removed"
    rows = [(entry["folder"], entry["runs"], size(int(str(entry["bytes"])))) for entry in report]
    state.show(
        Table(title=title, columns=("Data folder", "Runs", "Size"), rows=rows),
        {"dry_run": dry_run, "older_than_s": older_than_s, "removed": report},
    )


def _one_run(folders: list[Path], wanted: str) -> tuple[Path, str]:
    """The folder and id of the run with this id or name."""
    from tinkex.server.administration.disk_usage import disk_usage

    matching = [
        (folder, run.run_id)
        for folder in folders
        for run in disk_usage(folder).runs
        if wanted in (run.run_id, run.name)
    ]
    if not matching:
        raise click.ClickException(f"No run '{wanted}' keeps anything here; see `tinkex disk`.")
    if len(matching) > 1:
        ids = ", ".join(run_id for _, run_id in matching)
        raise click.ClickException(
            f"{len(matching)} runs are called '{wanted}': name one by id: {ids}"
        )
    return matching[0]


def _cleared(state: State, folder: Path, older_than_s: float, run_id: str) -> Cleared:
    """Clear a folder; that of the private server once it has ended, seconds after its last use."""
    from tinkex.client.session.embedded_server import IDLE_S
    from tinkex.server.administration.disk_usage import clear
    from tinkex.store.claim import InUseError

    try:
        return clear(folder, older_than_s=older_than_s, run_id=run_id)
    except InUseError:
        if not folder.name.startswith("local"):  # A server of the user's own ends when they end it.
            raise
    state.note("Waiting for the private server to end, as it does when nobody uses it ...")
    return clear(folder, older_than_s=older_than_s, run_id=run_id, wait_s=2 * IDLE_S)


def _would_go(held: DiskUsage, older_than_s: float, run_id: str) -> tuple[int, int]:
    limit = datetime.now(UTC).timestamp() - older_than_s
    if run_id:
        whole = [run for run in held.runs if run.run_id == run_id]
        return len(whole), sum(run.total for run in whole)
    chosen = [run for run in held.runs if run.used_at < limit and run.spare]
    return len(chosen), sum(run.spare for run in chosen) + held.other


def _data_folders(given: Path | None) -> Iterator[Path]:
    """Data folders that hold a database, the private server's first; only `given` where it is."""
    from tinkex.wire.local_servers import state_folder

    if given is not None:
        yield given.expanduser()
        return
    home = state_folder()
    for folder in (*sorted(home.glob("local*")), home / "server"):
        if (folder / "tinkex.db").is_file():
            yield folder


def _fetched_models() -> Iterator[tuple[Path, int]]:
    from tinkex.engine.model.default_model import cache_dir

    for folder in sorted((cache_dir() / "models").glob("*")):
        if folder.is_dir() and not folder.name.startswith("."):
            yield folder, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _runs_table(folder: Path, held: DiskUsage, show_all: bool) -> Table:
    runs = held.runs if show_all else held.runs[:10]
    rows = [_row(run) for run in runs]
    if rest := held.runs[len(runs) :]:
        total = sum(run.total for run in rest)
        rows.append((f"{len(rest)} more (--all)", "", "", "", "", "", size(total), ""))
    rows.append(("database", "", "", "", "", "", size(held.database), ""))
    rows.append(("leftovers", "", "", "", "", "", size(held.other), ""))
    columns = ("Name", "Used", "Checkpoints", "State", "Samplers", "Other", "Total", "Run ID")
    return Table(title=f"{folder}: {size(held.total)}", columns=columns, rows=rows)


def _row(run: RunDiskUsage) -> tuple[Any, ...]:
    sizes = run.sizes
    return (
        run.name,
        ago(datetime.fromtimestamp(run.used_at, UTC)) if run.used_at else "",
        _shown(sizes["checkpoints"]),
        _shown(sizes["state"] + sizes["requests"]),
        _shown(sizes["samplers"]),
        _shown(sum(sizes[kind] for kind in ("results", "losses", "trajectories"))),
        size(run.total),
        run.run_id,
    )


def _shown(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else "-"


def _as_data(found: dict[Path, DiskUsage], models: dict[Path, int]) -> dict[str, Any]:
    return {
        "folders": [
            {
                "folder": str(folder),
                "bytes": held.total,
                "database_bytes": held.database,
                "leftover_bytes": held.other,
                "runs": [{**asdict(run), "bytes": run.total} for run in held.runs],
            }
            for folder, held in found.items()
        ],
        "models": [{"folder": str(path), "bytes": size} for path, size in models.items()],
    }

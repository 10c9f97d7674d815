"""`tinkex run ...`: training runs, as tables and as JSON."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.arguments import paging_options
from tinkex.cli.commands.rollouts import rollouts
from tinkex.cli.completions import complete_run
from tinkex.cli.downloads import fetch_trace, trace_file
from tinkex.cli.listing import Listing, collect
from tinkex.cli.messages import words
from tinkex.cli.names import run_here, run_of, servers_here
from tinkex.cli.output import MISSING, Table, ago, properties, size
from tinkex.cli.state import Noun, State, pass_state
from tinkex.errors import TinkerError
from tinkex.runs.names import forget

if TYPE_CHECKING:
    from tinkex.types import TrainingRun

_PAGE = 100
_STYLES = {"OK": "green", "Failed": "red", "lost": "red", "running": "green"}


def _result(run: TrainingRun) -> str:
    """The reward or KL of a run, else its loss: that of RL is near zero whatever happens."""
    for name, value in (("reward", run.reward), ("kl", run.kl), ("loss", run.loss)):
        if value is not None:
            return f"{name} {value:.3g}"
    return ""


def _lora(run: TrainingRun) -> Any:
    return f"Rank {run.lora_rank}" if run.is_lora and run.lora_rank else run.is_lora


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# Name in --columns -> title, and how it is read from a run.
_COLUMNS: dict[str, tuple[str, Callable[[TrainingRun], Any]]] = {
    "name": ("Name", lambda run: run.name or ""),
    "state": ("State", lambda run: run.state or ("lost" if run.corrupted else "")),
    "steps": ("Steps", lambda run: "" if run.num_steps is None else run.num_steps),
    "result": ("Result", _result),
    "loss": ("Loss", lambda run: _figure(run.loss)),
    "reward": ("Reward", lambda run: _figure(run.reward)),
    "kl": ("KL", lambda run: _figure(run.kl)),
    "id": ("Run ID", lambda run: run.training_run_id),
    "model": ("Base Model", lambda run: run.base_model),
    "owner": ("Owner", lambda run: run.model_owner),
    "lora": ("LoRA", _lora),
    "updated": ("Last Update", lambda run: run.last_request_time),
    "status": ("Status", lambda run: "Failed" if run.corrupted else "OK"),
    "checkpoint": (
        "Last Checkpoint",
        lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else None,
    ),
    "checkpoint_time": (
        "Checkpoint Time",
        lambda run: run.last_checkpoint.time if run.last_checkpoint else None,
    ),
}
_INFO = "name state steps loss reward id model owner lora updated".split()
_DEFAULT_COLUMNS = "name,state,steps,result,updated,id"


def _listing(names: Iterable[str], title: str = "Training runs") -> Listing:
    return Listing("runs", title, dict(_COLUMNS[name] for name in names), _STYLES)


@click.group(cls=Noun)
def run() -> None:
    """List, inspect, name, note, stop and delete training runs."""


run.add_command(rollouts)


def _columns(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _COLUMNS]:
        raise click.BadParameter(f"no column '{unknown[0]}'; choose from {', '.join(_COLUMNS)}.")
    if not names:
        raise click.BadParameter(f"name at least one of {', '.join(_COLUMNS)}.")
    return names


@run.command("list")
@paging_options
@click.option(
    "-c",
    "--columns",
    default=_DEFAULT_COLUMNS,
    show_default=True,
    callback=_columns,
    help=f"Columns of the table, from {', '.join(_COLUMNS)}.",
)
@click.option("--all", "everywhere", is_flag=True, help="Of every server of this machine.")
@pass_state
def list_(state: State, limit: int, offset: int, columns: list[str], everywhere: bool) -> None:
    """List training runs, newest first."""
    if everywhere:
        _list_everywhere(state, limit, offset, columns)
        return
    with state.rest() as rest:
        runs, total = collect(
            rest.list_training_runs, "training_runs", limit=limit, offset=offset, page=_PAGE
        )
    state.show_items(_listing(columns), runs, total=total)


def _list_everywhere(state: State, limit: int, offset: int, columns: list[str]) -> None:
    listings = []
    for server in servers_here():
        try:
            with State(base_url=server).rest() as rest:
                runs, total = collect(
                    rest.list_training_runs, "training_runs", limit=limit, offset=offset, page=_PAGE
                )
        except TinkerError as exc:  # it may be stopping; the others are shown all the same
            state.note(f"The server {server} shows no runs: {words(exc)}")
            continue
        listings.append({"server": server, "runs": runs, "total": total})
        if state.format != "json":
            listing = _listing(columns, f"Runs of the server {server}")
            state.show_items(listing, runs, total=total)
    if state.format == "json":
        state.show("", {"servers": listings})


@run.command()
@click.argument("run_id")
@pass_state
def info(state: State, run_id: str) -> None:
    """Show one training run. RUN_ID may also be its name, its log folder or a checkpoint of it."""
    chosen = run_of(state, run_id)
    with state.rest() as rest:
        run = rest.get_training_run(chosen).result()
    state.show(lambda: _info_table(run), run)


run_argument = click.argument("run", shell_complete=complete_run)


@run.command()
@run_argument
@click.argument("name")
@pass_state
def rename(state: State, run: str, name: str) -> None:
    """Call RUN (a name, an id, a folder or a path) NAME."""
    _describe(state, run, name=name)


@run.command()
@run_argument
@click.argument("text")
@pass_state
def note(state: State, run: str, text: str) -> None:
    """Keep TEXT with RUN, in place of an earlier note; an empty one removes it."""
    _describe(state, run, note=text)


@run.command()
@run_argument
@click.argument("tags", nargs=-1)
@pass_state
def tag(state: State, run: str, tags: tuple[str, ...]) -> None:
    """Give RUN these TAGS, in place of those that it has."""
    _describe(state, run, tags=list(tags))


def _describe(state: State, run: str, **said: Any) -> None:
    chosen = run_of(state, run)
    with state.rest() as rest:
        described = rest.describe_run(chosen, **said).result()
    state.show(lambda: _info_table(described), described)


@run.command()
@run_argument
@click.option("--reason", default="", help="Told to the program that trains it.")
@pass_state
def stop(state: State, run: str, reason: str) -> None:
    """End what RUN has queued and running. Its checkpoints stay: it can be resumed."""
    chosen = run_of(state, run)
    with state.rest() as rest:
        stopped = rest.stop_run(chosen, reason).result()
    count = stopped.num_ended
    were = "1 request was" if count == 1 else f"{count or 'no'} requests were"
    text = f"Stopped {run}; {were} queued or running."
    state.show(text, {"run": chosen, "num_ended": stopped.num_ended})


@run.command()
@run_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@pass_state
def delete(state: State, run: str, yes: bool) -> None:
    """Delete RUN for good, with all its checkpoints, curves and state.

    A resumed run goes with all its segments. Refused while it trains and while a checkpoint of it
    is published; what it used stays billed. A log folder on this machine stays.
    """
    local, chosen = run_here(state, run), run_of(state, run)
    with state.rest() as rest:
        described = rest.get_training_run(chosen).result()
        known = " ".join(filter(None, [described.name, f"({described.training_run_id})"]))
        if not yes:
            question = f"Delete the run {known} and all its checkpoints for good?"
            click.confirm(question, abort=True, err=True)
        deleted = rest.delete_run(described.training_run_id).result()
    if local is not None:
        forget(str(local.folder))
        state.note(f"Its log folder stays: {local.folder}")
    freed = f"{deleted.num_checkpoints} checkpoints, {size(deleted.freed_bytes)}"
    state.show(f"Deleted the run {known}: {freed}.", deleted)


@run.command()
@click.argument("run_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it; standard output where that is a file or a pipe, else RUN.pftrace.",
)
@pass_state
def trace(state: State, run_id: str, output: Path | None) -> None:
    """Fetch the timeline of a run, to open in ui.perfetto.dev.

    RUN_ID may also be its name, its log folder or a checkpoint of it.

    It shows requests as they waited and ran, the passes of the device, samples with their prefill
    and decode, saves and rate limits.
    """
    chosen = run_of(state, run_id)
    with state.rest() as rest:
        url = rest.export_run_trace(chosen).result()
    if output is None and not sys.stdout.isatty() and state.format != "json":
        with tempfile.TemporaryDirectory() as folder:
            fetch_trace(url, file := Path(folder, "trace"))
            sys.stdout.buffer.write(file.read_bytes())
        return
    target = output or trace_file(run_id)
    num_bytes = fetch_trace(url, target)
    state.show(
        properties(None, {"Run": run_id, "Destination": target, "Size": size(num_bytes)}),
        {"run_id": run_id, "destination": str(target), "file_size_bytes": num_bytes},
    )


def _info_table(run: TrainingRun) -> Table:
    pairs = {title: text for title, text in _listing(_INFO).cells(run).items() if text != ""}
    for title, checkpoint in (
        ("Last Checkpoint", run.last_checkpoint),
        ("Last Sampler Checkpoint", run.last_sampler_checkpoint),
    ):
        pairs[title] = (
            f"{checkpoint.tinker_path} ({ago(checkpoint.time)})" if checkpoint else MISSING
        )
    if run.step_seconds:
        parts = ", ".join(f"{phase} {took:.3g}" for phase, took in run.step_seconds.items())
        pairs["Step Time"] = f"{sum(run.step_seconds.values()):.3g} s ({parts})"
    for worker in run.workers or ():
        pairs[f"Worker: {worker.name}"] = (
            f"busy {worker.utilisation:.0%}, KV cache {size(worker.kv_bytes)}, "
            f"adapters {size(worker.adapter_bytes)}"
        )
    if run.note:
        pairs["Note"] = run.note
    if run.tags:
        pairs["Tags"] = ", ".join(run.tags)
    if run.segments:
        pairs["Resumed"] = ", ".join(f"at step {one.step}" for one in run.segments[1:])
    pairs |= {f"Setting: {key}": value for key, value in (run.settings or {}).items()}
    metadata = {key: value for key, value in (run.user_metadata or {}).items() if key != "name"}
    pairs |= {f"Metadata: {key}": value for key, value in metadata.items()}
    return properties(f"Training run {run.training_run_id}", pairs)

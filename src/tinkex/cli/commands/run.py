"""`tinkex run ...`: training runs, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.arguments import paging_options
from tinkex.cli.commands.rollouts import rollouts
from tinkex.cli.listing import Listing, collect
from tinkex.cli.output import MISSING, Table, ago, properties, size
from tinkex.cli.state import Noun, State, pass_state

if TYPE_CHECKING:
    from tinkex.types import TrainingRun

_PAGE = 100
_STYLES = {"OK": "green", "Failed": "red", "lost": "red", "running": "green"}


def _result(run: TrainingRun) -> str:
    """The reward of a run, else its loss: the loss of RL is near zero whatever happens."""
    for name, value in (("reward", run.reward), ("loss", run.loss)):
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


def _listing(names: Iterable[str]) -> Listing:
    return Listing("runs", "Training runs", dict(_COLUMNS[name] for name in names), _STYLES)


@click.group(cls=Noun)
def run() -> None:
    """List and inspect training runs."""


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
    help=f"Columns of the table, from {','.join(_COLUMNS)}.",
)
@pass_state
def list_(state: State, limit: int, offset: int, columns: list[str]) -> None:
    """List training runs, newest first."""
    with state.rest() as rest:
        runs, total = collect(
            rest.list_training_runs, "training_runs", limit=limit, offset=offset, page=_PAGE
        )
    state.show_items(_listing(columns), runs, total=total)


@run.command()
@click.argument("run_id")
@pass_state
def info(state: State, run_id: str) -> None:
    """Show one training run. RUN_ID may also be a tinker:// path of one of its checkpoints."""
    with state.rest() as rest:
        if run_id.startswith("tinker://"):
            run = rest.get_training_run_by_tinker_path(run_id).result()
        else:
            run = rest.get_training_run(run_id).result()
    state.show(lambda: _info_table(run), run)


def _info_table(run: TrainingRun) -> Table:
    pairs = _listing(_INFO).cells(run)
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
    pairs |= {f"Metadata: {key}": value for key, value in (run.user_metadata or {}).items()}
    return properties(f"Training run {run.training_run_id}", pairs)

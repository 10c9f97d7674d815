"""`tinkex run ...`: training runs, as tables and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.arguments import limit_option, offset_option
from tinkex.cli.commands.rollouts import rollouts
from tinkex.cli.output import MISSING, Table, ago, properties, size
from tinkex.cli.paging import collect, counted
from tinkex.cli.state import Noun, State, pass_state

if TYPE_CHECKING:
    from tinkex.types import TrainingRun

_PAGE = 100
_STYLES = {"OK": "green", "Failed": "red", "lost": "red", "running": "green"}
_TITLES = {
    "name": "Name",
    "state": "State",
    "steps": "Steps",
    "result": "Result",
    "loss": "Loss",
    "reward": "Reward",
    "id": "Run ID",
    "model": "Base Model",
    "owner": "Owner",
    "lora": "LoRA",
    "updated": "Last Update",
    "status": "Status",
    "checkpoint": "Last Checkpoint",
    "checkpoint_time": "Checkpoint Time",
}
_INFO = "name state steps loss reward id model owner lora updated".split()
_DEFAULT_COLUMNS = "name,state,steps,result,updated,id"


@click.group(cls=Noun)
def run() -> None:
    """List and inspect training runs."""


run.add_command(rollouts)


def _columns(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _TITLES]:
        raise click.BadParameter(f"no column '{unknown[0]}'; choose from {', '.join(_TITLES)}.")
    if not names:
        raise click.BadParameter(f"name at least one of {', '.join(_TITLES)}.")
    return names


@run.command("list")
@limit_option(20)
@offset_option()
@click.option(
    "-c",
    "--columns",
    default=_DEFAULT_COLUMNS,
    show_default=True,
    callback=_columns,
    help=f"Columns of the table, from {','.join(_TITLES)}.",
)
@pass_state
def list_(state: State, limit: int, offset: int, columns: list[str]) -> None:
    """List training runs, newest first."""
    with state.rest() as rest:
        runs, total = collect(
            rest.list_training_runs, "training_runs", limit=limit, offset=offset, page=_PAGE
        )
    state.show(
        Table(
            title=counted("Training runs", runs, total),
            columns=[_TITLES[name] for name in columns],
            rows=[[_field(run, name) for name in columns] for run in runs],
            styles=_STYLES,
        ),
        {"runs": runs},
    )


@run.command()
@click.argument("run_id")
@pass_state
def info(state: State, run_id: str) -> None:
    """Show one training run. RUN_ID may also be a tinker:// path of one of its checkpoints."""
    with state.rest() as rest:
        if run_id.startswith("tinker://"):
            found = rest.get_training_run_by_tinker_path(run_id).result()
        else:
            found = rest.get_training_run(run_id).result()
    state.show(lambda: _info_table(found), found)


def _info_table(run: TrainingRun) -> Table:
    pairs: dict[str, Any] = {_TITLES[name]: _field(run, name) for name in _INFO}
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


def _result(run: TrainingRun) -> str:
    """What a person asks of a run: the loss of RL is near zero whatever happens."""
    for name, value in (("reward", run.reward), ("loss", run.loss)):
        if value is not None:
            return f"{name} {value:.3g}"
    return ""


def _field(run: TrainingRun, name: str) -> Any:
    last = run.last_checkpoint
    return {
        "name": run.name or "",
        "state": run.state or ("lost" if run.corrupted else ""),
        "steps": "" if run.num_steps is None else run.num_steps,
        "result": _result(run),
        "loss": "" if run.loss is None else f"{run.loss:.4g}",
        "reward": "" if run.reward is None else f"{run.reward:.4g}",
        "id": run.training_run_id,
        "model": run.base_model,
        "owner": run.model_owner,
        "lora": f"Rank {run.lora_rank}" if run.is_lora and run.lora_rank else run.is_lora,
        "updated": run.last_request_time,
        "status": "Failed" if run.corrupted else "OK",
        "checkpoint": last.checkpoint_id if last else None,
        "checkpoint_time": last.time if last else None,
    }[name]

"""`tinkex quickstart`: fine-tune a small model on this machine and show what changed.

The work is `tinkex.recipes.quickstart`; here is what a person sees of it, including after Ctrl-C:
the run is saved, and the same command goes on.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.messages import program
from tinkex.cli.progress import stderr_console, steps, waiting
from tinkex.cli.state import Leaf, State, pass_state
from tinkex.contract.run_folder import CHECKPOINTS_FILE, CONFIG_FILE

if TYPE_CHECKING:
    from tinkex.recipes.quickstart import QuickstartResult


@click.command(cls=Leaf)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("quickstart"),
    show_default=True,
    help="Where the plot, the adapter and the log go.",
)
@click.option("--fresh", is_flag=True, help="Start over, forgetting an earlier run.")
@click.option("--epochs", type=click.FloatRange(min=0, min_open=True), default=2.0, hidden=True)
@click.option("--model", help="Another base model than the default one.")
@pass_state
def quickstart(state: State, folder: Path, fresh: bool, epochs: float, model: str | None) -> None:
    """Fine-tune SmolLM2-135M to answer as a pirate, here and now, on the CPU if need be."""
    from tinkex.cli.downloads import fetch_folder
    from tinkex.contract.models import DEFAULT_MODEL
    from tinkex.recipes.quickstart import run

    if fresh and folder.exists():
        _remove(folder)
    model, adapter = model or DEFAULT_MODEL, folder / "adapter"
    began = time.monotonic()
    try:
        if state.base_url is None and model == DEFAULT_MODEL:
            _fetch_model()
        state.note(f"Training a LoRA adapter on {model}; Ctrl-C saves and stops.")
        with state.service(name="quickstart") as service, steps("quickstart") as on_step:
            outcome = run(folder, service, on_step, on_step.note, model=model, epochs=epochs)
            if outcome.result.interrupted:
                raise KeyboardInterrupt
        fetch_folder(state, outcome.result.sampler_path, adapter, force=True)
    except KeyboardInterrupt:
        _say_how_to_resume(state, folder)
        raise click.exceptions.Exit(130) from None
    seconds = time.monotonic() - began
    state.show(
        lambda: _print(outcome, folder, adapter, seconds),
        {
            "held_out_loss_before": outcome.loss_before,
            "held_out_loss_after": outcome.loss_after,
            "steps": outcome.result.step,
            "steps_now": outcome.num_trained,
            "seconds": round(seconds, 1),
            "sampler_path": outcome.result.sampler_path,
            "state_path": outcome.result.state_path,
            "adapter": str(adapter),
            "plot": str(folder / "loss.png"),
            "answers": [asdict(exchange) for exchange in outcome.exchanges],
        },
    )


def _fetch_model() -> None:
    """Fetch before the server does, so that the person sees what takes the time."""
    from tinkex.engine.model import default_model

    with waiting("Looking for the default model (93 MB, fetched once)"):
        default_model.folder()


def _remove(folder: Path) -> None:
    """Only what the quickstart made: a folder of the user's own is not ours to delete."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / "data.jsonl").is_file():
        raise click.ClickException(f"{folder} is not a quickstart folder; remove it yourself.")
    shutil.rmtree(folder)


def _say_how_to_resume(state: State, folder: Path) -> None:
    option = "" if folder == Path("quickstart") else f" --folder {folder}"
    stopped = (
        "Stopped; the training so far is saved. Resume"
        if (folder / CHECKPOINTS_FILE).is_file()
        else "Stopped before the first checkpoint. Start again"
    )
    state.note(f"\n{stopped}: {program()} quickstart{option}")


def _print(outcome: QuickstartResult, folder: Path, adapter: Path, seconds: float) -> None:
    for exchange in outcome.exchanges:
        click.echo(f"\n  {click.style(exchange.question, bold=True)}")
        click.echo(f"    before  {_one_line(exchange.before, 90)}")
        click.echo(f"    after   {click.style(_one_line(exchange.after), fg='green')}")
    click.echo(
        f"\nHeld-out loss {outcome.loss_before:.2f} -> {outcome.loss_after:.2f} "
        f"in {outcome.result.step} steps{_when(outcome, seconds)}."
    )
    click.echo(f"Plot     {folder / 'loss.png'}\nAdapter  {adapter} (PEFT)")
    stderr_console().print(f"\nNext: {program()} chat {folder}", markup=False)


def _when(outcome: QuickstartResult, seconds: float) -> str:
    """Old figures do not look like new ones."""
    if outcome.num_trained == outcome.result.step:
        return f", {seconds:.0f} s"
    if outcome.num_trained:
        return f", {outcome.num_trained} of them now, {seconds:.0f} s"
    return " of an earlier run; --fresh trains anew"


def _one_line(text: str, most: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most].rpartition(" ")[0] + " ..."

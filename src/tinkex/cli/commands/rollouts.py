"""`tinkex run rollouts`: read what a model said while it was trained.

Reads `rollouts.jsonl` of a run's folder; a server is asked for a name that no folder has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinkex.cli.arguments import near_runs
from tinkex.cli.completions import complete_run
from tinkex.cli.names import run_here
from tinkex.cli.state import Leaf, State, pass_state
from tinkex.contract.run_folder import ROLLOUTS_FILE
from tinkex.runs import json_lines


@click.command(cls=Leaf)
@click.argument("run", type=click.Path(path_type=Path), shell_complete=complete_run)
@click.option("--step", type=int, help="Only this step; a negative one counts from the end.")
@click.option("--best", is_flag=True, help="The best rewarded first.")
@click.option("--worst", is_flag=True, help="The worst rewarded first.")
@click.option("--contains", default="", help="Only answers with this text in them.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Most answers shown."
)
@pass_state
def rollouts(
    state: State,
    run: Path,
    step: int | None,
    best: bool,
    worst: bool,
    contains: str,
    limit: int,
) -> None:
    """Show the answers that were sampled in training. RUN is the run's name or its log folder."""
    if best and worst:
        raise click.UsageError("--best and --worst exclude each other.")
    known_run = None if (run / ROLLOUTS_FILE).is_file() else run_here(state, str(run))
    file = (known_run.folder if known_run else run) / ROLLOUTS_FILE
    if not file.is_file():
        if known_run is None:
            raise click.ClickException(
                f"'{run}' is neither the name nor the folder of a run.{near_runs(str(run))}"
            )
        raise click.ClickException(
            f"The run in {known_run.folder} kept no answers: it has no {ROLLOUTS_FILE}. DPO writes "
            "none, SFT none with --samples 0."
        )
    if step is not None and step < 0:
        step += 1 + max((int(answer["step"]) for answer in json_lines.read(file)), default=0)
    answers: Iterator[dict[str, Any]] = (
        answer
        for answer in json_lines.read(file)
        if (step is None or answer["step"] == step) and contains in answer["text"]
    )
    if best or worst:
        rewarded = [answer for answer in answers if answer.get("reward") is not None]
        answers = iter(sorted(rewarded, key=lambda answer: float(answer["reward"]), reverse=best))
    shown = list(itertools.islice(answers, limit))

    def print_answers() -> None:
        for answer in shown:
            _show(answer)
        if not shown:
            state.note("No such answers.")

    state.show(print_answers, shown)


def _show(answer: dict[str, Any]) -> None:
    reward, advantage = answer.get("reward"), answer.get("advantage")
    head = f"step {answer['step']}  group {answer['group']}  {len(answer['tokens'])} tokens"
    if reward is not None:
        head += f"  reward {reward:.3g}"
    if advantage is not None:
        head += f"  advantage {advantage:+.3g}"
    colour = "green" if (advantage or 0) > 0 else "red" if (advantage or 0) < 0 else None
    click.echo(click.style(head, bold=True, fg=colour))
    click.echo(f"  prompt  {_indented(_question(answer['prompt']))}")
    click.echo(f"  answer  {_indented(answer['text'])}\n")


def _question(prompt: str) -> str:
    """The end of a prompt, where the question is; templates begin with a long preface."""
    return prompt if len(prompt) <= 400 else "... " + prompt[-400:]


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n          ")

"""`tinkex train sft|dpo|rl|distill`: run a recipe with options, a progress bar and a log folder.

The loops are in `tinkex.recipes`; this module turns options into a config and a result into text.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.arguments import named
from tinkex.cli.commands.pull import prepare
from tinkex.cli.completions import complete_model, complete_run
from tinkex.cli.messages import program
from tinkex.cli.output import properties
from tinkex.cli.progress import RESULTS, label, steps
from tinkex.cli.state import Noun, State, pass_state
from tinkex.errors import ConfigError
from tinkex.runs import json_lines

if TYPE_CHECKING:
    from tinkex.recipes.loop import Result

Command = Callable[..., Any]


@click.group(cls=Noun)
def train() -> None:
    """Fine-tune: SFT, DPO, RL or distillation. The loops are in tinkex/recipes: copy them."""


def _options(config: str, *specs: tuple[str, Any, str]) -> Callable[[Command], Command]:
    """Add the options of a recipe. One that is not given is None, and the recipe decides."""

    def add(command: Command) -> Command:
        for flag, kind, text in reversed((*specs, *_COMMON)):
            command = click.option(
                flag, type=kind, default=None, help=text, cls=_RecipeOption, config=config
            )(command)
        command = click.option(
            "--name", help="Call the run this: `tinkex chat NAME`, `--from NAME`."
        )(command)
        command = click.option(
            "--from",
            "start",
            shell_complete=complete_run,
            help="Train on from a run (its name or folder) or a tinker:// checkpoint.",
        )(command)
        command = click.option(
            "--plot", "show_plot", is_flag=True, help="Draw the curve in the terminal at the end."
        )(command)
        return click.option(
            "--tracker",
            "trackers",
            multiple=True,
            type=click.Choice(["wandb", "trackio", "tensorboard"]),
            help="Also send metrics there; repeatable.",
        )(command)

    return add


class _RecipeOption(click.Option):
    """An option whose help shows the recipe's default; only the help imports the recipe."""

    def __init__(self, *args: Any, config: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = config

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        default = _defaults(self._config).get(str(self.name))
        return (
            (record[0], f"{record[1]}  [default: {default}]")
            if record and default is not None
            else record
        )


def _defaults(config: str) -> dict[str, Any]:
    module, _, name = config.partition(":")
    recipe = getattr(importlib.import_module(f"tinkex.recipes.{module}"), name)
    shown = {field.name: field.default for field in fields(recipe) if field.default is not MISSING}
    return {**shown, "log_dir": f"runs/{module}-NAME, after the file"}


_COMMON: tuple[tuple[str, Any, str], ...] = (
    ("--log-dir", str, "Metrics, config and checkpoints. The same folder resumes a run."),
    ("--model", str, "Base model."),
    ("--rank", int, "LoRA rank."),
    ("--learning-rate", float, "Peak learning rate."),
    ("--schedule", click.Choice(["linear", "constant"]), "Course of the learning rate."),
    ("--save-every", int, "Steps between checkpoints."),
    ("--seed", int, "Seed of weights, order and samples."),
)
_LENGTH: tuple[tuple[str, Any, str], ...] = (
    ("--batch-size", int, "Rows per step."),
    ("--epochs", float, "Passes over the data."),
    ("--max-length", int, "Longest row in tokens; longer ones are reported and left out."),
)

_EVAL: tuple[tuple[str, Any, str], ...] = (
    ("--eval-share", float, "Share of rows held out."),
    ("--eval-every", int, "Steps between evaluations."),
)
_STOP: tuple[tuple[str, Any, str], ...] = (
    ("--keep-best", bool, "Keep a checkpoint of the best evaluation (true or false)."),
    ("--patience", int, "Stop after this many evaluations without a better one; 0 is never."),
)


@train.command()
@click.argument("data")
@_options(
    "sft:SftConfig",
    *_LENGTH,
    ("--learn", click.Choice(["all", "last"]), "Learn all assistant turns, or the last."),
    *_EVAL,
    ("--samples", int, "Held-out questions answered at each evaluation, to read along."),
    *_STOP,
)
@pass_state
def sft(state: State, /, data: str, **options: Any) -> None:
    """Learn the answers in DATA: chat `messages` or prompt/completion rows, as JSONL, JSON, CSV
    or a Hugging Face dataset id."""
    from tinkex.recipes import sft

    _run(state, sft.train, partial(sft.SftConfig, data=data), options, rows=data)


@train.command()
@click.argument("data")
@_options(
    "dpo:DpoConfig",
    *_LENGTH,
    ("--beta", float, "How closely to stay to the reference model; larger is closer."),
    *_EVAL,
)
@pass_state
def dpo(state: State, /, data: str, **options: Any) -> None:
    """Prefer `chosen` over `rejected` in the rows of DATA."""
    from tinkex.recipes import dpo

    _run(state, dpo.train, partial(dpo.DpoConfig, data=data), options, rows=data)


@train.command()
@click.argument("reward")
@click.option("--prompts", help="File or dataset of prompts; default: prompts() beside REWARD.")
@_options(
    "rl:RlConfig",
    ("--steps", int, "Training steps."),
    ("--prompts-per-step", int, "Prompts per step."),
    ("--group-size", int, "Answers per prompt."),
    ("--max-tokens", int, "Longest answer."),
    ("--max-turns", int, "Most answers of an episode, with an environment."),
    ("--temperature", float, "Sampling temperature."),
    (
        "--loss-fn",
        click.Choice(["importance_sampling", "ppo", "cispo"]),
        "Loss of the sampled answers.",
    ),
    ("--updates-per-step", int, "Optimizer steps per batch of samples."),
    ("--max-policy-kl", float, "Leave out the rest of a batch beyond this KL to its sampler."),
    ("--router-replay", bool, "Train a mixture on the experts its samples passed (true or false)."),
    ("--kl-to", str, "Report the KL to `base`, a run or a checkpoint."),
    ("--kl-coef", float, "Penalty on that KL."),
    ("--reward-by", str, "Report rewards by this field of the rows, too."),
    *_EVAL,
    *_STOP,
    ("--stop-at-reward", float, "Stop when the held-out reward reaches this."),
)
@pass_state
def rl(state: State, /, reward: str, prompts: str | None, **options: Any) -> None:
    """Raise the reward of REWARD, a function or environment named FILE.py:NAME.

    A function is called as reward(completion, row) and returns a number; row is the prompt's row.
    An environment is a class with start() and step(answer), for several turns: see
    tinkex/recipes/episodes.py.
    """
    from tinkex.recipes import rl

    module, function = load_function(reward)
    if prompts is None and not callable(getattr(module, "prompts", None)):
        raise click.UsageError(
            "Give --prompts FILE, or define prompts() beside the reward, returning rows."
        )
    rows = prompts if prompts is not None else module.prompts()
    file = reward.rpartition(":")[0]
    _run(state, rl.train, rl.RlConfig, options, function, rows, rows=prompts, named_after=file)


@train.command()
@click.argument("prompts")
@click.option(
    "--teacher",
    required=True,
    shell_complete=complete_model,
    help="Base model, a run's name or folder, or a tinker:// path, on the same server.",
)
@_options(
    "distill:DistillConfig",
    ("--steps", int, "Training steps."),
    ("--prompts-per-step", int, "Prompts per step."),
    ("--samples-per-prompt", int, "Answers per prompt."),
    ("--max-tokens", int, "Longest answer."),
    ("--temperature", float, "Sampling temperature."),
    *_EVAL,
)
@pass_state
def distill(state: State, /, prompts: str, teacher: str, **options: Any) -> None:
    """Learn to speak like a teacher: answer PROMPTS, and learn from the teacher's scores."""
    from tinkex.recipes import distill

    config = partial(distill.DistillConfig, teacher=named(teacher) or teacher)
    _run(state, distill.train, config, options, prompts, rows=prompts)


def load_function(name: str) -> tuple[Any, Callable[..., float]]:
    """`FILE.py:FUNCTION` -> (module, function)."""
    file, colon, attribute = name.rpartition(":")
    path = Path(file)
    if not colon or path.suffix != ".py":
        raise click.UsageError(f"'{name}' is not a function; write FILE.py:FUNCTION.")
    if not path.is_file():
        raise click.UsageError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise ConfigError(f"{path} does not load: {type(exc).__name__}: {exc}") from exc
    function = getattr(module, attribute, None)
    if not callable(function):
        raise click.UsageError(f"{path} has no function '{attribute}'.")
    return module, function


def _run(
    state: State,
    train: Callable[..., Result],
    config_of: Callable[..., Any],
    options: dict[str, Any],
    *inputs: Any,
    rows: str | None,
    named_after: str = "",
) -> None:
    """Train by a recipe, and show how it ended.

    Args:
        inputs: What `train` takes between the service and the callbacks.
        rows: The file or dataset, where there is one; looked for before a model is fetched.
        named_after: The file that names the run; `rows` by default.
    """
    from tinkex.recipes.data import check_source

    recipe, show_plot = train.__module__.rpartition(".")[2], options.pop("show_plot")
    config = config_of(**_settings(recipe, named_after or rows or "", options))
    if rows is not None:
        check_source(rows)
    prepare(state, config.model)
    # In the server's listings the run has the name of its folder.
    service = state.service(model=config.model, name=Path(config.log_dir).name)
    with service as client, steps(recipe) as on_step:
        result = train(config, client, *inputs, on_step, on_step.note)
    _show(state, config.log_dir, result, show_plot)


def _settings(recipe: str, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that options were given for; the recipe's defaults stand for the others."""
    from tinkex.runs.names import find_path, remember

    name, start = options.pop("name"), options.pop("start")
    settings = {name: value for name, value in options.items() if value is not None}
    settings["trackers"] = tuple(settings.get("trackers", ()))
    if settings.get("kl_to", "base") != "base":
        settings["kl_to"] = named(settings["kl_to"])
    # Named after what is trained on: a second file never meets the log of the first.
    folder = f"runs/{name}" if name else f"runs/{recipe}-{Path(source).stem}"
    settings.setdefault("log_dir", folder)
    if start is not None:
        if "model" in settings or "rank" in settings:
            raise click.UsageError(
                "--from brings its model and rank; leave --model and --rank out."
            )
        settings["model"] = find_path(start, for_training=True)
        if settings["model"] is None:
            raise click.UsageError(
                f"'{start}' is no run here: --from takes a name, a log folder, or a tinker:// path."
            )
    if name:
        remember(name, settings["log_dir"])
    return settings


def _show(state: State, log_dir: str, result: Result, show_plot: bool) -> None:
    if result.interrupted:
        state.note(
            f"Stopped after step {result.step}; everything is saved.\n"
            f"Resume with the same command (log folder {log_dir})."
        )
    state.show(
        properties(
            None,
            {
                "Steps": result.step,
                # What a person asks first; the rest is in metrics.jsonl and in the JSON.
                **{
                    label(name): f"{result.metrics[name]:.4g}"
                    for name in RESULTS
                    if name in result.metrics
                },
                "State": result.state_path,
                "Sampler": result.sampler_path,
                **({"Best": f"step {result.best_step}"} if result.best_step is not None else {}),
                **({"Best sampler": result.best_path} if result.best_path else {}),
                "Log": log_dir,
            },
        ),
        {
            "steps": result.step,
            "interrupted": result.interrupted,
            "metrics": dict(result.metrics),
            "state_path": result.state_path,
            "sampler_path": result.sampler_path,
            "best_step": result.best_step,
            "best_path": result.best_path,
            "log_dir": log_dir,
        },
    )
    if show_plot:
        _draw(state, Path(log_dir))
    if result.interrupted:
        raise click.exceptions.Exit(130)
    state.note(f"Talk to it: {program()} chat {_called(log_dir)}")


def _draw(state: State, folder: Path) -> None:
    """The curve that matters most, in characters, on stderr."""
    from tinkex.runs.plots import terminal_plot

    records = list(json_lines.read(folder / "metrics.jsonl"))
    for name in ("reward", "kl", "loss"):
        if drawn := terminal_plot(records, name, label(name)):
            state.note(f"\n{drawn}\n")
            return
    state.note("Too few steps for a plot.")


def _called(log_dir: str) -> str:
    """The shortest thing that `tinkex chat` takes for this run."""
    from tinkex.runs.names import known

    folder = Path(log_dir).resolve()
    return next((run.name for run in known() if run.folder == folder), log_dir)

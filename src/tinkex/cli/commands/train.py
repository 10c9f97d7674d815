"""`tinkex train sft|dpo|rl|distill`: run a recipe with options, a progress bar and a log folder.

The loops are in `tinkex.recipes`; this module turns options into a config and a result into text.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli import started_commands
from tinkex.cli.arguments import near_runs
from tinkex.cli.commands.pull import prepare
from tinkex.cli.completions import complete_model, complete_run
from tinkex.cli.messages import program
from tinkex.cli.names import go_to, resolve, resolve_start, run_here
from tinkex.cli.output import properties
from tinkex.cli.progress import RESULTS, label, steps
from tinkex.cli.reward_files import load_reward
from tinkex.cli.state import Noun, State, pass_state
from tinkex.contract.run_folder import CONFIG_FILE, METRICS_FILE
from tinkex.errors import ConfigError
from tinkex.runs import json_lines
from tinkex.runs.names import find
from tinkex.wire.local_servers import read_record

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
            names = flag.split(",")  # the first is the setting's, the others mean the same
            command = click.option(
                *names, type=kind, default=None, help=text, cls=_RecipeOption, config=config
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
        command = click.option(
            "--dry-run",
            is_flag=True,
            help="Count steps and tokens, estimate time, money and disk, and train nothing.",
        )(command)
        return click.option(
            "--tracker",
            "trackers",
            multiple=True,
            type=click.Choice(["wandb", "trackio", "tensorboard"]),
            help="Also send metrics there; repeatable.",
        )(command)

    return add


def rate_or_auto(text: str) -> float | str:
    """The type of `--learning-rate`: a number, or `auto`."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise click.BadParameter(f"'{text}' is neither a number nor 'auto'.") from None


class _RecipeOption(click.Option):
    """An option whose help shows the recipe's default; only the help imports the recipe."""

    def __init__(self, *args: Any, config: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = config

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        default = _defaults(self.config).get(str(self.name))
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
    ("--learning-rate,--lr", rate_or_auto, "Peak learning rate, or auto: by the model's size."),
    (
        "--schedule",
        click.Choice(["constant", "linear", "cosine"]),
        "Course of the learning rate after the warmup; linear and cosine end at a tenth.",
    ),
    ("--warmup", float, "Steps that the learning rate rises for; below 1 a share of all."),
    ("--weight-decay", float, "Decoupled weight decay, as in AdamW."),
    ("--clip", float, "Largest norm of a step's gradient; 0 is off."),
    ("--accumulate", int, "Batches per optimizer step, one pass each."),
    ("--save-every", int, "Steps between checkpoints."),
    ("--seed", int, "Seed of weights, order and samples."),
)
_LENGTH: tuple[tuple[str, Any, str], ...] = (
    ("--batch-size", int, "Rows of a batch; a step takes --accumulate of them."),
    ("--epochs", float, "Passes over the data."),
    ("--max-length", int, "Longest row in tokens; longer ones are reported and left out."),
)

_EVAL: tuple[tuple[str, Any, str], ...] = (
    ("--eval-data", str, "File or dataset to evaluate on, instead of a share of the rows."),
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
    (
        "--pack",
        bool,
        "Count as one row what fits into --max-length together: fewer, fuller steps "
        "(true or false).",
    ),
    *_EVAL,
    ("--samples", int, "Held-out questions answered at each evaluation, to read along."),
    *_STOP,
)
@pass_state
def sft(state: State, /, data: str, **options: Any) -> None:
    """Learn the answers in DATA: `messages`, ShareGPT, prompt/completion, alpaca or plain `text`
    rows, as JSONL, JSON, CSV or a Hugging Face dataset id."""
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
@click.argument("reward", required=False)
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="FILE.py:NAME[=WEIGHT]",
    help="A reward function with its weight; repeatable, and the weighted rewards are added up.",
)
@click.option("--prompts", help="File or dataset of prompts; default: prompts() beside REWARD.")
@_options(
    "rl:RlConfig",
    ("--steps", int, "Training steps."),
    ("--prompts-per-step", int, "Prompts per step, times --accumulate."),
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
def rl(
    state: State,
    /,
    reward: str | None,
    rewards: tuple[str, ...],
    prompts: str | None,
    **options: Any,
) -> None:
    """Raise the reward of REWARD, a function or environment named FILE.py:NAME.

    A function gets what its parameters name: completion, prompt, row, any column of the prompts'
    rows; or completions, prompts and rows, all of a step at once. TRL's reward functions work.
    An environment is a class with start() and step(answer), for several turns: see
    tinkex/recipes/episodes.py.
    """
    from tinkex.recipes import rl

    names = [*([reward] if reward else []), *rewards]
    if not names:
        raise click.UsageError("Name a reward: FILE.py:NAME, or --reward FILE.py:NAME=WEIGHT.")
    loaded = [load_reward(name) for name in names]
    modules = [module for module, _, _ in loaded]
    beside = next((m for m in modules if callable(getattr(m, "prompts", None))), None)
    if prompts is None and beside is None:
        raise click.UsageError(
            "Give --prompts FILE, or define prompts() beside the reward, returning rows."
        )
    rows = prompts if prompts is not None or beside is None else beside.prompts()
    weighted = [(function, weight) for _, function, weight in loaded]
    judge = weighted[0][0] if weighted[0][1] == 1.0 and len(weighted) == 1 else weighted
    file = names[0].rpartition(":")[0]
    _run(state, rl.train, rl.RlConfig, options, judge, rows, rows=prompts, named_after=file)


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
    ("--prompts-per-step", int, "Prompts per step, times --accumulate."),
    ("--samples-per-prompt", int, "Answers per prompt."),
    ("--max-tokens", int, "Longest answer."),
    ("--temperature", float, "Sampling temperature."),
    *_EVAL,
)
@pass_state
def distill(state: State, /, prompts: str, teacher: str, **options: Any) -> None:
    """Learn to speak like a teacher: answer PROMPTS, and learn from the teacher's scores."""
    from tinkex.recipes import distill

    config = partial(distill.DistillConfig, teacher=resolve(state, teacher))
    _run(state, distill.train, config, options, prompts, rows=prompts)


@train.command(hidden=True)
@pass_state
def forms(state: State) -> None:
    """Options of the recipes and the export, as JSON: the console's forms are made of it."""
    from tinkex.cli.command_forms import forms_of
    from tinkex.cli.commands.export import export
    from tinkex.cli.output import print_json

    def default_of(param: click.Parameter) -> Any:
        if isinstance(param, _RecipeOption):
            return _defaults(param.config).get(str(param.name))
        return param.default if param.name == "form" else None

    def is_recipe(command: click.Command) -> bool:
        return any(isinstance(param, _RecipeOption) for param in command.params)

    recipes = {name: command for name, command in train.commands.items() if is_recipe(command)}
    print_json(forms_of({**recipes, "export": export}, default_of))


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

    command = click.get_current_context()
    started = {"command": command.info_name, "params": dict(command.params), "cwd": os.getcwd()}
    recipe, show_plot = train.__module__.rpartition(".")[2], options.pop("show_plot")
    dry_run = options.pop("dry_run")
    config = config_of(**_settings(state, recipe, named_after or rows or "", options, dry_run))
    for source in (rows, config.eval_data):
        if source:
            check_source(source)
    if (known := find(config.log_dir)) is not None:
        go_to(state, known)
    prepare(state, config.model)
    # In the server's listings the run has the name of its folder.
    service = state.service(model=config.model, name=Path(config.log_dir).name)
    if dry_run:
        from tinkex.cli.plan_table import show_plan

        with service as client:
            show_plan(state, recipe, config, client, inputs)
        return
    try:
        with service as client, steps(recipe) as on_step:
            started_commands.keep(Path(config.log_dir), started)
            try:
                result = train(config, client, *inputs, on_step, on_step.note)
            except Exception:
                if on_step.is_under_way and (saved := _saved(config.log_dir)):
                    on_step.note(saved)
                raise
            if result.interrupted:
                client.close("interrupted", "Ctrl-C")
        _show(state, config.log_dir, result, show_plot)
    except KeyboardInterrupt:  # the second Ctrl-C, or one before the first step
        state.note(_stopped(config.log_dir))
        raise click.exceptions.Exit(130) from None


def _stopped(log_dir: str) -> str:
    """A run that was stopped at once: how far it is saved, and how it goes on."""
    if saved := _saved(log_dir):
        return f"Stopped at once. {saved}"
    return "Stopped before the first checkpoint. The same command starts again."


def _saved(log_dir: str) -> str:
    """How far a run is saved, and how it goes on; empty before its first checkpoint."""
    run = find(log_dir)
    if run is None or not run.state_path:
        return ""
    return (
        f"The first {run.step} steps are saved.\n"
        f"Resume with: {program()} train resume {_called(log_dir)}"
    )


@train.command()
@click.argument("run", shell_complete=complete_run)
@pass_state
@click.pass_context
def resume(ctx: click.Context, state: State, run: str) -> None:
    """Go on with RUN, a name or a log folder, with the settings that it was started with.

    A folder that somebody else began is refused: its command may run code of theirs.
    """
    known = run_here(state, run)
    if known is None:
        raise ConfigError(f"No run is called {run!r}, and no log folder.{near_runs(run)}")
    folder = known.folder.resolve()
    started = started_commands.kept(folder)
    command = train.commands.get(str(started.get("command")))
    if command is None:
        raise ConfigError(
            f"{known.folder} does not say how its run was started: `tinkex train` did not, or an "
            "earlier one. Start it again with the command or the program that began it."
        )
    # Files that the command names are where they were from there.
    with contextlib.chdir(started["cwd"]):
        settings = read_record(folder / CONFIG_FILE)
        log_dir = str(settings.get("log_dir", ""))
        if Path(log_dir).resolve() != folder:
            log_dir = str(folder)  # the folder was moved
        params = {**started["params"], "log_dir": log_dir, "name": None}
        # A run that was trained on since then has another checkpoint now than when it was named.
        for param, setting in _NAMES.items():
            if params.get(param) is not None:
                params[param] = settings.get(setting, params[param])
        ctx.invoke(command, **params)


_NAMES = {"start": "model", "teacher": "teacher", "kl_to": "kl_to"}
"""Options that take the name of a run, and the settings that hold the checkpoint it meant."""


def _settings(
    state: State, recipe: str, source: str, options: dict[str, Any], dry_run: bool
) -> dict[str, Any]:
    """The settings that options were given for; the recipe's defaults stand for the others."""
    from tinkex.runs.names import remember

    name, start = options.pop("name"), options.pop("start")
    settings = {name: value for name, value in options.items() if value is not None}
    settings["trackers"] = tuple(settings.get("trackers", ()))
    if "eval_data" in settings and "eval_share" in settings:
        raise click.UsageError("--eval-data takes the place of --eval-share; give one of them.")
    if settings.get("kl_to", "base") != "base":
        settings["kl_to"] = resolve(state, settings["kl_to"])
    # Named after what is trained on: a second file never meets the log of the first.
    folder = f"runs/{name}" if name else f"runs/{recipe}-{Path(source).stem}"
    settings.setdefault("log_dir", folder)
    if start is not None:
        if "model" in settings or "rank" in settings:
            raise click.UsageError(
                "--from brings its model and rank; leave --model and --rank out."
            )
        settings["model"] = resolve_start(state, start)
    if name and not dry_run:
        remember(name, settings["log_dir"])
    return settings


def _show(state: State, log_dir: str, result: Result, show_plot: bool) -> None:
    if result.interrupted:
        state.note(
            f"Stopped after step {result.step}; everything is saved.\n"
            f"Resume with: {program()} train resume {_called(log_dir)}"
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

    records = list(json_lines.read(folder / METRICS_FILE))
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

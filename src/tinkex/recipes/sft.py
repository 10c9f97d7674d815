"""Supervised fine-tuning: learn to say what the assistant says in a file of conversations.

Copy this file and change it. The loop is four calls: `forward_backward`, `optim_step`, and, at the
end, `save_state` and `save_weights_for_sampler`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinkex import (
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from tinkex.errors import ConfigError
from tinkex.recipes.batches import Rows, batch_at, parts_of
from tinkex.recipes.data import Conversation, load_conversations
from tinkex.recipes.hooks import Hooks, OnEval, OnNote, OnSave, OnStep, print_step
from tinkex.recipes.loop import Result, begin, grad_norm
from tinkex.recipes.options import RunOptions, check_positive
from tinkex.recipes.render import Rendered, Renderer
from tinkex.recipes.rollouts import Rollout, RolloutLog
from tinkex.runs.plots import Panel

PANELS = (
    Panel(
        metrics={"loss": "training rows", "held_out_loss": "held-out rows"},
        label="loss (nats per learned token)",
    ),
)
PICTURE = (PANELS, "SFT", "loss.png")
ANSWER_TOKENS = 48
"""The longest answer to a held-out question at an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig(RunOptions):
    data: str
    """JSONL, JSON or CSV file, or a Hugging Face dataset id."""
    batch_size: int = 8
    epochs: float = 3.0
    max_length: int = 1024
    """Longest conversation, in tokens; longer rows are reported and left out."""
    learn: Literal["all", "last"] = "all"
    """Learn all of the assistant's turns, or only the last of each row."""
    pack: bool = False
    """Count as one row of a batch what fits into `max_length` tokens together: fewer, fuller steps.
    Rows stay apart all the same; none sees another."""
    samples: int = 1
    """Held-out questions that are answered at each evaluation, to read along; 0 is none."""
    keep_best: bool = False
    """Keep a checkpoint of the lowest held-out loss."""
    patience: int = 0
    """Stop after this many evaluations without a lower held-out loss; 0 is never."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_positive(self, "batch_size", "epochs", "max_length")
        if self.samples < 0:
            raise ConfigError(f"samples must be at least 0, got {self.samples}.")
        if not self.is_evaluated and (self.patience or self.keep_best):
            raise ConfigError(
                "patience and keep_best look at held-out rows: eval_share must be above 0, or "
                "eval_data name a file."
            )


def train(
    config: SftConfig,
    service: ServiceClient,
    on_step: OnStep = print_step,
    on_note: OnNote = print,
    on_eval: OnEval | None = None,
    on_save: OnSave | None = None,
) -> Result:
    """Run, or resume, one SFT run. Ctrl-C ends it after the current step, with a checkpoint."""
    rows = Rows.of(config, load_conversations, config.data)
    hooks = Hooks.of(on_step, on_note, on_eval, on_save)
    run = begin(service, config, hooks, may_change=["epochs"])  # a finished run may be prolonged
    if isinstance(run, Result):
        return run
    training, renderer = run.training, run.renderer
    examples, held_out = run.split(rows, lambda row: render(row, renderer, config))
    groups = groups_of(examples, config)
    step_size = config.batch_size * config.accumulate
    on_note(figures(examples, step_size * len(examples) / len(groups)))
    to_ask = [example for example in held_out if example.question][: config.samples]
    rollouts = RolloutLog(config.log_dir, start_step=run.start)

    def evaluate(step: int) -> dict[str, float]:
        loss = mean_loss(training, held_out)
        # The finished model is there to be asked; its answers are not part of the log.
        if to_ask and step < run.num_steps:
            for answer in answers(run.policy(step), to_ask, renderer, step):
                rollouts.write([answer])
                on_note(f"step {step}: {answer.text}")
        return {"held_out_loss": loss}

    num_steps = num_steps_of(groups, config)
    watch = run.watch("held_out_loss", "min")
    with run.steps(num_steps, evaluate if held_out else None, watch) as steps:
        for step in steps:
            batch = batch_of(groups, config, step)
            # The server sums over tokens; dividing by their number makes the loss a mean.
            num_learned = sum(example.num_learned for example in batch)
            # All calls leave before one is awaited: the server need not wait for us in between.
            passes = [
                training.forward_backward([e.datum(1 / num_learned) for e in part], "cross_entropy")
                for part in parts_of(batch, config.accumulate)
            ]
            optim_step = training.optim_step(run.optimizer(step))
            loss = sum(one.result().metrics["loss:sum"] for one in passes)

            num_tokens = sum(len(example.tokens) for example in batch)
            measured = {"loss": loss, **grad_norm(optim_step.result()), "num_tokens": num_tokens}
            run.report(step, {**run.evaluated, **measured}, num_tokens)
    return run.result(PICTURE)


def render(row: Conversation, renderer: Renderer, config: SftConfig) -> Rendered:
    if row.text:
        return renderer.plain(row.text, config.max_length)
    return renderer.example(
        row.messages, config.learn, config.max_length, num_prompt=row.num_prompt
    )


def groups_of(examples: Sequence[Rendered], config: SftConfig) -> list[list[Rendered]]:
    """The rows of batches: examples one by one, or as many as fit together."""
    return packed(examples, config.max_length) if config.pack else [[one] for one in examples]


def num_steps_of(groups: Sequence[Sequence[Rendered]], config: SftConfig) -> int:
    return math.ceil(len(groups) * config.epochs / (config.batch_size * config.accumulate))


def batch_of(groups: Sequence[Sequence[Rendered]], config: SftConfig, step: int) -> list[Rendered]:
    """The examples of a step."""
    size = config.batch_size * config.accumulate
    return [one for group in batch_at(groups, size, step, config.seed) for one in group]


def packed(examples: Sequence[Rendered], size: int) -> list[list[Rendered]]:
    """Groups of rows that have at most `size` tokens together: the longest first, each into the
    group that it fills best."""
    groups: list[list[Rendered]] = []
    free: list[tuple[int, int]] = []  # (tokens that still fit, group), sorted
    for example in sorted(examples, key=lambda one: -len(one.tokens)):
        length = len(example.tokens)
        place = bisect.bisect_left(free, (length, -1))
        room, group = free.pop(place) if place < len(free) else (size, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(example)
        bisect.insort(free, (room - length, group))
    return groups


def figures(examples: Sequence[Rendered], rows_per_step: float) -> str:
    """How much there is to learn, for a person: rows, tokens, lengths."""
    lengths = sorted(len(example.tokens) for example in examples)
    learned = sum(example.num_learned for example in examples)
    total = sum(lengths)
    return (
        f"{len(lengths)} rows to train on: {total:,} tokens, {learned:,} of them learned; "
        f"{lengths[len(lengths) // 2]} in a typical row, {lengths[-1]} in the longest, "
        f"about {int(total // len(lengths) * rows_per_step):,} a step"
    )


def answers(
    sampler: SamplingClient, rows: Sequence[Rendered], renderer: Renderer, step: int
) -> Iterator[Rollout]:
    """Greedy answers to the last questions of some rows."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, stop=renderer.stop)
    prompts = [renderer.prompt(row.question) for row in rows]
    futures = [sampler.sample(ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    for number, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        sequence = future.result().sequences[0]
        tokens = list(sequence.tokens)
        logprobs = list(sequence.logprobs or [])
        yield Rollout.of(renderer, prompt, tokens, step, group=number, logprobs=logprobs)


def mean_loss(training: TrainingClient, examples: Sequence[Rendered]) -> float:
    """Loss per learned token, without training on it."""
    num_learned = sum(example.num_learned for example in examples)
    data = [example.datum(1 / num_learned) for example in examples]
    return float(training.forward(data, "cross_entropy").result().metrics["loss:sum"])

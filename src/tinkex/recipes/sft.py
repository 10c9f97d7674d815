"""Supervised fine-tuning: learn to say what the assistant says in a file of conversations.

Copy this file and change it. The loop is four calls: `forward_backward`, `optim_step`, and, at the
end, `save_state` and `save_weights_for_sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinkex import (
    AdamParams,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from tinkex.errors import ConfigError
from tinkex.recipes.best import Watch
from tinkex.recipes.data import Conversation, load_conversations, split_off
from tinkex.recipes.loop import (
    OnNote,
    OnStep,
    Result,
    Run,
    RunOptions,
    batch_at,
    check_positive,
    finished,
    open_log,
    print_step,
)
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
        if not self.eval_share and (self.patience or self.keep_best):
            raise ConfigError(
                "patience and keep_best look at held-out rows: eval_share must be above 0."
            )


def train(
    config: SftConfig, service: ServiceClient, on_step: OnStep = print_step, on_note: OnNote = print
) -> Result:
    """Run, or resume, one SFT run. Ctrl-C ends it after the current step, with a checkpoint."""
    loaded = load_conversations(config.data)
    log = open_log(config, may_change=["epochs"])  # a finished run may be prolonged
    if (ended := finished(service, log, on_note)) is not None:
        return ended
    run = Run(service, log, config, on_step, on_note)
    training, renderer = run.training, run.renderer
    examples, held_out = run.split(
        loaded,
        lambda row: renderer.example(
            row.messages, learn=config.learn, max_length=config.max_length
        ),
    )
    on_note(figures(examples, config.batch_size))
    to_ask = split_off(loaded.rows, config.eval_share)[1][: config.samples]
    num_steps = math.ceil(len(examples) * config.epochs / config.batch_size)
    rollouts = RolloutLog(config.log_dir, start_step=run.start)
    watch = Watch(
        log,
        "held_out_loss",
        mode="min",
        keep=config.keep_best,
        patience=config.patience,
        on_note=on_note,
    )

    def evaluate(step: int) -> dict[str, float]:
        loss = mean_loss(training, held_out)
        # The finished model is there to be asked; its answers are not part of the log.
        if to_ask and step < run.num_steps:
            for answer in answers(run.policy(step), to_ask, renderer, step):
                rollouts.write([answer])
                on_note(f"step {step}: {answer.text}")
        return {"held_out_loss": loss}

    with run.steps(num_steps, evaluate if held_out else None, watch) as steps:
        for step in steps:
            batch = batch_at(examples, config.batch_size, step, config.seed)
            # The server sums over tokens; dividing by their number makes the loss a mean.
            num_learned = sum(example.num_learned for example in batch)
            data = [example.datum(1 / num_learned) for example in batch]
            # Both calls leave before either is awaited: the server need not wait for us in between.
            forward_backward = training.forward_backward(data, "cross_entropy")
            optim_step = training.optim_step(AdamParams(learning_rate=run.learning_rate(step)))
            loss = forward_backward.result().metrics["loss:sum"]
            optim_step.result()

            num_tokens = sum(len(example.tokens) for example in batch)
            run.report(step, {**run.evaluated, "loss": loss, "num_tokens": num_tokens}, num_tokens)
    return run.result(PICTURE)


def figures(examples: Sequence[Rendered], batch_size: int) -> str:
    """How much there is to learn, for a person: rows, tokens, lengths."""
    lengths = sorted(len(example.tokens) for example in examples)
    learned = sum(example.num_learned for example in examples)
    total = sum(lengths)
    return (
        f"{len(lengths)} rows to train on: {total:,} tokens, {learned:,} of them learned; "
        f"{lengths[len(lengths) // 2]} in a typical row, {lengths[-1]} in the longest, "
        f"about {total // len(lengths) * batch_size:,} a step"
    )


def answers(
    sampler: SamplingClient, rows: Sequence[Conversation], renderer: Renderer, step: int
) -> Iterator[Rollout]:
    """Greedy answers to the last questions of some rows."""
    params = SamplingParams(max_tokens=48, temperature=0.0, stop=renderer.stop)
    prompts = [renderer.prompt(row.messages[:-1]) for row in rows]
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

"""Supervised fine-tuning: learn to say what the assistant says in a file of conversations.

Copy this file and change it. The loop is four calls: `forward_backward`, `optim_step`, and, at the
end, `save_state` and `save_weights_for_sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinkex import AdamParams, ModelInput, SamplingParams, ServiceClient, TrainingClient
from tinkex.errors import ConfigError, InvalidInputError
from tinkex.recipes.best import Watch, stopped_at
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
    training, start, renderer = run.training, run.start, run.renderer
    examples, held_out = run.split(loaded, lambda row: render(row, renderer, config))
    on_note(figures(examples, config.batch_size))
    to_ask = split_off(loaded.rows, config.eval_share)[1][: config.samples]
    length = math.ceil(len(examples) * config.epochs / config.batch_size)
    num_steps = start if stopped_at(config.log_dir, start) else length
    rollouts = RolloutLog(config.log_dir, start_step=start)
    watch = Watch(
        log,
        "held_out_loss",
        mode="min",
        keep=config.keep_best,
        patience=config.patience,
        on_note=on_note,
    )

    metrics: dict[str, float] = {}
    with run.steps(num_steps) as steps:
        for step in steps:
            metrics = {}
            if held_out and step % config.eval_every == 0:
                metrics["held_out_loss"] = mean_loss(training, held_out)
                for said in answers(training, to_ask, renderer, step):
                    rollouts.write([said])
                    on_note(f"step {step}: {said.text}")
                if watch.see(training, step, metrics["held_out_loss"]):
                    log.metrics(step, metrics)
                    return run.end(step, metrics, PICTURE, watch.best)

            batch = batch_at(examples, config.batch_size, step, config.seed)
            # The server sums over tokens; dividing by their number makes the loss a mean.
            num_learned = sum(example.num_learned for example in batch)
            data = [example.datum(1 / num_learned) for example in batch]
            forward_backward = training.forward_backward(data, "cross_entropy")
            optim_step = training.optim_step(AdamParams(learning_rate=run.learning_rate(step)))
            metrics["loss"] = forward_backward.result().metrics["loss:sum"]
            optim_step.result()

            metrics["num_tokens"] = sum(len(example.tokens) for example in batch)
            run.report(step, metrics, int(metrics["num_tokens"]))

    if run.is_interrupted:
        return run.stopped(metrics)
    if held_out:
        metrics["held_out_loss"] = mean_loss(training, held_out)
        log.metrics(num_steps, {"held_out_loss": metrics["held_out_loss"]})
        if start < num_steps:
            watch.see(training, num_steps, metrics["held_out_loss"])
    return run.end(num_steps, metrics, PICTURE, watch.best)


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
    training: TrainingClient, rows: Sequence[Conversation], renderer: Renderer, step: int
) -> Iterator[Rollout]:
    """Greedy answers to the last questions of some rows, as the model says them now."""
    if not rows:
        return
    sampler = training.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=48, temperature=0.0, stop=renderer.stop)
    prompts = [renderer.prompt(row.messages[:-1]) for row in rows]
    futures = [sampler.sample(ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    for number, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        sequence = future.result().sequences[0]
        tokens = list(sequence.tokens)
        logprobs = list(sequence.logprobs or [])
        yield Rollout.of(renderer, prompt, tokens, step, group=number, logprobs=logprobs)


def render(row: Conversation, renderer: Renderer, config: SftConfig) -> Rendered:
    example = renderer.example(row.messages, learn=config.learn)
    if len(example.tokens) > config.max_length:
        raise InvalidInputError(
            f"{len(example.tokens)} tokens, more than max_length {config.max_length}"
        )
    return example


def mean_loss(training: TrainingClient, examples: Sequence[Rendered]) -> float:
    """Loss per learned token, without training on it."""
    num_learned = sum(example.num_learned for example in examples)
    data = [example.datum(1 / num_learned) for example in examples]
    return float(training.forward(data, "cross_entropy").result().metrics["loss:sum"])

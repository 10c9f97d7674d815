"""Direct preference optimization: prefer the chosen answer over the rejected one.

Copy this file and change it. The loss is a plain torch function of the answers' log-probabilities;
the base model's own log-probabilities are the reference, so the policy starts at a margin of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex import AdamParams, ModelInput, SamplingClient, ServiceClient, TrainingClient
from tinkex.recipes.data import Preference, load_preferences
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
    sampler_of,
)
from tinkex.recipes.render import Rendered, Renderer
from tinkex.runs.plots import Panel

if TYPE_CHECKING:
    import torch

PANELS = (
    Panel(metrics={"loss": "training pairs", "held_out_loss": "held-out pairs"}, label="loss"),
    Panel(
        metrics={"accuracy": "training pairs", "held_out_accuracy": "held-out pairs"},
        label="share of pairs preferred",
    ),
)
PICTURE = (PANELS, "DPO", "loss.png")


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig(RunOptions):
    data: str
    """Rows with `prompt`, `chosen` and `rejected`."""
    learning_rate: float = 5e-4
    batch_size: int = 4
    """Pairs per step."""
    epochs: float = 2.0
    beta: float = 0.1
    """How closely to stay to the reference model; larger is closer."""
    max_length: int = 1024

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        check_positive(self, "batch_size", "epochs", "beta", "max_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    chosen: Rendered
    rejected: Rendered

    def sides(self) -> tuple[Rendered, Rendered]:
        return self.chosen, self.rejected


def train(
    config: DpoConfig, service: ServiceClient, on_step: OnStep = print_step, on_note: OnNote = print
) -> Result:
    """Run, or resume, one DPO run. Ctrl-C ends it after the current step, with a checkpoint."""
    loaded = load_preferences(config.data)
    log = open_log(config, may_change=["epochs"])  # a finished run may be prolonged
    if (ended := finished(service, log, on_note)) is not None:
        return ended
    run = Run(service, log, config, on_step, on_note)
    training = run.training
    reference = sampler_of(service, config.model)
    pairs, held_out = run.split(loaded, lambda row: render(row, run.renderer, config))
    held_out_reference = reference_logprobs(reference, answers_of(held_out))
    num_steps = math.ceil(len(pairs) * config.epochs / config.batch_size)

    def evaluate(step: int) -> dict[str, float]:
        if step == 0:  # An untrained policy prefers nothing: the margin of every pair is zero.
            return {}
        return held_out_metrics(training, held_out, held_out_reference, config.beta)

    with run.steps(num_steps, evaluate if held_out else None) as steps:
        for step in steps:
            answers = answers_of(batch_at(pairs, config.batch_size, step, config.seed))
            loss_fn = dpo_loss(answers, reference_logprobs(reference, answers), config.beta)

            data = [answer.datum() for answer in answers]
            forward_backward = training.forward_backward_custom(data, loss_fn)
            optim_step = training.optim_step(AdamParams(learning_rate=run.learning_rate(step)))
            measured = forward_backward.result().metrics
            optim_step.result()

            metrics = {
                "loss": measured["loss:sum"],
                "accuracy": measured["accuracy:mean"],
                "margin": measured["margin:mean"],
                **run.evaluated,
            }
            run.report(step, metrics, sum(len(answer.tokens) for answer in answers))
    return run.result(PICTURE)


def render(row: Preference, renderer: Renderer, config: DpoConfig) -> Pair:
    def answer(text: str) -> Rendered:
        messages = (*row.prompt, {"role": "assistant", "content": text})
        return renderer.example(messages, learn="last", max_length=config.max_length)

    return Pair(chosen=answer(row.chosen), rejected=answer(row.rejected))


def answers_of(pairs: Sequence[Pair]) -> list[Rendered]:
    """chosen, rejected, chosen, rejected ..."""
    return [side for pair in pairs for side in pair.sides()]


def held_out_metrics(
    training: TrainingClient, pairs: Sequence[Pair], reference: Sequence[float], beta: float
) -> dict[str, float]:
    """Loss and accuracy on pairs that are not trained on."""
    import torch

    answers = answers_of(pairs)
    data = [answer.datum() for answer in answers]
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    logprobs = [torch.tensor(output["logprobs"].tolist()) for output in outputs]
    loss, counted = dpo_loss(answers, reference, beta)(data, logprobs)
    return {"held_out_loss": float(loss), "held_out_accuracy": counted["accuracy:mean"]}


def reference_logprobs(reference: SamplingClient, answers: Sequence[Rendered]) -> list[float]:
    """Log-probability of each whole answer under the base model."""
    futures = [
        reference.compute_logprobs(ModelInput.from_ints(list(answer.tokens))) for answer in answers
    ]
    return [
        sum(
            logprob
            for logprob, weight in zip(future.result(), answer.weights, strict=True)
            if weight and logprob is not None
        )
        for future, answer in zip(futures, answers, strict=True)
    ]


def dpo_loss(
    answers: Sequence[Rendered], reference: Sequence[float], beta: float
) -> Callable[[Sequence[Any], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]:
    """-log sigmoid(beta * (policy's preference - reference's)), averaged over the pairs.

    Answers come as chosen, rejected, chosen, rejected ...
    """
    import torch
    import torch.nn.functional as F

    def loss_fn(
        data: Sequence[Any], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, float]]:
        policy = torch.stack(
            [
                (logprobs_T * torch.tensor(answer.weights[1:])).sum()
                for logprobs_T, answer in zip(logprobs, answers, strict=True)
            ]
        )
        # Pairs alternate: chosen answers at even positions, rejected ones at odd.
        gain = policy - torch.tensor(reference)
        margin = beta * (gain[0::2] - gain[1::2])
        return -F.logsigmoid(margin).mean(), {
            "accuracy:mean": float((margin > 0).float().mean()),
            "margin:mean": float(margin.detach().mean()),
        }

    return loss_fn

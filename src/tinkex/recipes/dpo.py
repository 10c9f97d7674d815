"""Direct preference optimization: prefer the chosen answer over the rejected one.

Copy this file and change it. The loss is a plain torch function of the answers' log-probabilities;
the base model's own log-probabilities are the reference, so the policy starts at a margin of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tinkex import ModelInput, SamplingClient, ServiceClient, TrainingClient
from tinkex.recipes.batches import Rows, batch_at, parts_of
from tinkex.recipes.data import Preference, load_preferences
from tinkex.recipes.hooks import Hooks, OnEval, OnNote, OnSave, OnStep, print_step
from tinkex.recipes.loop import Result, begin, grad_norm, sampler_of
from tinkex.recipes.options import RunOptions, check_positive
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
TIE = 1e-3
"""Nats. A pair whose gains differ by less is a tie, which counts half: an untrained policy has an
accuracy of one half, and not what rounding makes of margins that are zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig(RunOptions):
    data: str
    """Rows with `prompt`, `chosen` and `rejected`."""
    learning_rate: float | Literal["auto"] = 5e-4
    batch_size: int = 4
    """Pairs of a batch; a step takes `accumulate` of them."""
    epochs: float = 2.0
    beta: float = 0.1
    """How closely to stay to the reference model; larger is closer."""
    max_length: int = 1024
    """Longest prompt with its answer, in tokens; longer pairs are reported and left out."""

    AUTO_SHARE: ClassVar[float] = 0.5

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
    config: DpoConfig,
    service: ServiceClient,
    on_step: OnStep = print_step,
    on_note: OnNote = print,
    on_eval: OnEval | None = None,
    on_save: OnSave | None = None,
) -> Result:
    """Run, or resume, one DPO run. Ctrl-C ends it after the current step, with a checkpoint."""
    rows = Rows.of(config, load_preferences, config.data)
    hooks = Hooks.of(on_step, on_note, on_eval, on_save)
    run = begin(service, config, hooks, may_change=["epochs"])  # a finished run may be prolonged
    if isinstance(run, Result):
        return run
    training = run.training
    reference = sampler_of(service, config.model)
    # A server that takes a teacher scores the answers itself, and once for all epochs.
    teacher = config.model if training.has_teachers else None
    pairs, held_out = run.split(rows, lambda row: render(row, run.renderer, config))
    held_out_reference = reference_logprobs(reference, answers_of(held_out))
    num_steps = num_steps_of(pairs, config)

    def evaluate(step: int) -> dict[str, float]:
        if step == 0:  # An untrained policy prefers nothing: the margin of every pair is zero.
            return {}
        return held_out_metrics(training, held_out, held_out_reference, config.beta)

    with run.steps(num_steps, evaluate if held_out else None) as steps:
        for step in steps:
            batch = batch_of(pairs, config, step)
            passes = []
            for part in parts_of(batch, config.accumulate):
                answers = answers_of(part)
                asked = None if teacher else reference_logprobs(reference, answers)
                loss_fn = dpo_loss(answers, asked, config.beta, share=len(part) / len(batch))
                data = [answer.datum() for answer in answers]
                passes.append(training.forward_backward_custom(data, loss_fn, teacher=teacher))
            optim_step = training.optim_step(run.optimizer(step))
            measured = [one.result().metrics for one in passes]

            metrics = {
                "loss": sum(one["loss:sum"] for one in measured),
                "accuracy": sum(one["accuracy:sum"] for one in measured),
                "margin": sum(one["margin:sum"] for one in measured),
                **grad_norm(optim_step.result()),
                **run.evaluated,
            }
            run.report(step, metrics, sum(len(answer.tokens) for answer in answers_of(batch)))
    return run.result(PICTURE)


def render(row: Preference, renderer: Renderer, config: DpoConfig) -> Pair:
    def answer(text: str) -> Rendered:
        messages = (*row.prompt, {"role": "assistant", "content": text})
        return renderer.example(messages, learn="last", max_length=config.max_length)

    return Pair(chosen=answer(row.chosen), rejected=answer(row.rejected))


def num_steps_of(pairs: Sequence[Pair], config: DpoConfig) -> int:
    return math.ceil(len(pairs) * config.epochs / (config.batch_size * config.accumulate))


def batch_of(pairs: Sequence[Pair], config: DpoConfig, step: int) -> list[Pair]:
    """The pairs of a step."""
    return batch_at(pairs, config.batch_size * config.accumulate, step, config.seed)


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
    return {"held_out_loss": float(loss), "held_out_accuracy": counted["accuracy:sum"]}


def reference_logprobs(reference: SamplingClient, answers: Sequence[Rendered]) -> list[float]:
    """Log-probability of each whole answer under the base model."""
    futures = [
        reference.compute_logprobs(ModelInput.from_ints(list(answer.tokens))) for answer in answers
    ]
    return [
        answer_logprob(answer, future.result()[1:])
        for future, answer in zip(futures, answers, strict=True)
    ]


def answer_logprob(answer: Rendered, logprobs: Sequence[float | None]) -> float:
    """Log-probability of a whole answer, of one value for each target."""
    pairs = zip(logprobs, answer.weights[1:], strict=True)
    return sum(logprob for logprob, weight in pairs if weight and logprob is not None)


def dpo_loss(
    answers: Sequence[Rendered], reference: Sequence[float] | None, beta: float, share: float = 1.0
) -> Callable[[Sequence[Any], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]:
    """-log sigmoid(beta * (policy's preference - reference's)), averaged over the pairs.

    Args:
        answers: chosen, rejected, chosen, rejected ...
        reference: Log-probabilities of the answers; None: the server has filled in those of each
            target.
        share: Part of the batch that these pairs are; loss and metrics of its parts add up.
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
        known = reference
        if known is None:
            taught = [datum.loss_fn_inputs["teacher_logprobs"].tolist() for datum in data]
            known = [answer_logprob(*each) for each in zip(answers, taught, strict=True)]
        # Pairs alternate: chosen answers at even positions, rejected ones at odd.
        gain = policy - torch.tensor(known)
        preference = gain[0::2] - gain[1::2]
        return share * -F.logsigmoid(beta * preference).mean(), {
            "accuracy:sum": share * accuracy(preference.detach()),
            "margin:sum": share * float(beta * preference.detach().mean()),
        }

    return loss_fn


def accuracy(preference: torch.Tensor) -> float:
    """Share of the pairs whose chosen answer gained more than the rejected; ties count half."""
    is_won, is_tied = preference > TIE, preference.abs() <= TIE
    return float((is_won.float() + 0.5 * is_tied.float()).mean())

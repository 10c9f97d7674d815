"""Add weighted regularizers to a base loss: loss_total = base + sum_i weight_i * reg_i.

The sum is a torch scalar with its graph. Terms are computed side by side on threads (torch frees
the interpreter lock inside its operations) or one after another, within one time limit; a term
that fails or is overdue ends the computation with an error that names it, before anything was sent
or applied. A thread cannot be stopped from outside, so an overdue term is left to end by itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex import events
from tinkex.errors import InvalidInputError, RegularizerError, RegularizerTimeoutError
from tinkex.regularizers.loss_answer import check_answer
from tinkex.regularizers.outputs import BaseLossOutput, CustomLossOutput, RegularizerOutput
from tinkex.regularizers.penalty import Logprobs, as_tensors

if TYPE_CHECKING:
    from torch import Tensor

LossTerm = Callable[[Any, Any], tuple["Tensor", dict[str, float]]]
_Answer = tuple["Tensor", dict[str, float]]


@dataclass(frozen=True)
class RegularizerSpec:
    """A term: `fn(data, logprobs) -> (scalar, metrics)`, how much it counts, and its name.

    The name defaults to that of the penalty or function and must be unique in a pipeline.
    """

    fn: LossTerm
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidInputError(f"expected a function, got {self.fn!r}.", path="fn")
        if not self.name:
            default = getattr(self.fn, "name", "") or getattr(self.fn, "__name__", "")
            object.__setattr__(self, "name", default or type(self.fn).__name__)
        if not isinstance(self.name, str):
            raise InvalidInputError(f"expected a string, got {self.name!r}.", path="name")
        ok = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not ok or not math.isfinite(self.weight) or self.weight < 0:
            raise InvalidInputError(
                f"weight must be a finite number, 0 or more, got {self.weight!r}. To reward "
                "instead of penalise, return the negated value from the function.",
                path=f"regularizer {self.name!r}",
            )


@dataclass(frozen=True)
class Pipeline:
    """A base loss and its regularizers, callable like any custom loss.

    `pipeline(data, logprobs)` gives (loss_total, flat metrics), the shape that
    `forward_backward_custom` wants; `compute` gives the terms as a `CustomLossOutput`.
    """

    base: LossTerm
    specs: Sequence[RegularizerSpec] = ()
    parallel: bool = True
    timeout_s: float | None = 30.0
    """For all terms together; None waits for ever."""
    track_grad_norms: bool = False
    """Norms of the gradients of base, each term and total: one more backward pass for each."""

    def __post_init__(self) -> None:
        if not callable(self.base):
            raise InvalidInputError(f"expected a function, got {self.base!r}.", path="base")
        names = [spec.name for spec in self.specs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidInputError(
                f"regularizer names must be unique, {twice[0]!r} is used {names.count(twice[0])} "
                "times. Give RegularizerSpec a name.",
                path="specs",
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidInputError(f"must be above 0, got {self.timeout_s}.", path="timeout_s")

    def __call__(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, dict[str, float]]:
        total, output = self.compute(data, logprobs)
        return total, output.flat()

    def compute(self, data: Sequence[Any], logprobs: Logprobs) -> tuple[Tensor, CustomLossOutput]:
        """Return loss_total with its graph, and what each term came to.

        Raises:
            RegularizerError: A term failed, or returned something that cannot be trained on.
            RegularizerTimeoutError: A term was not done in time.
        """
        tensors = as_tensors(logprobs)
        deadline_s = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        terms = [
            _Term(kind, spec, data, self._own(logprobs))
            for kind, spec in [
                ("base loss", RegularizerSpec(self.base, name="base")),
                *(("regularizer", spec) for spec in self.specs),
            ]
        ]
        for batch in [terms] if self.parallel else [[term] for term in terms]:
            _run(batch, deadline_s, self.timeout_s)
        (base, base_metrics), *answers = [term.answer.result() for term in terms]
        contributions = [
            spec.weight * value.to(base)
            for spec, (value, _) in zip(self.specs, answers, strict=True)
        ]
        total = sum(contributions, base)
        norm = _grad_norm if self.track_grad_norms else lambda value, tensors: None
        outputs = {
            spec.name: _output(spec, value, metrics, norm(value, tensors))
            for spec, (value, metrics) in zip(self.specs, answers, strict=True)
        }
        return total, CustomLossOutput(
            loss_total=float(total.detach()),
            base_loss=BaseLossOutput(
                value=float(base.detach()), grad_norm=norm(base, tensors), metrics=base_metrics
            ),
            regularizers=outputs,
            regularizer_total=math.fsum(out.contribution for out in outputs.values()),
            total_grad_norm=norm(total, tensors),
        )

    def _own(self, logprobs: Logprobs) -> Logprobs:
        """Tensors for one term alone, where terms run side by side.

        Two threads that use one leaf can stop for good in torch 2.13: one waits for the GIL with
        the leaf's lock in hand (`grad_accumulator`), the other for that lock with the GIL.
        """
        import torch

        if not self.parallel or not self.specs:
            return logprobs
        with torch.enable_grad():
            if isinstance(logprobs, torch.Tensor):
                return logprobs.clone()
            return [tensor.clone() for tensor in logprobs]


def _output(
    spec: RegularizerSpec, value: Tensor, metrics: dict[str, float], norm: float | None
) -> RegularizerOutput:
    number = float(value.detach())
    return RegularizerOutput(
        name=spec.name,
        value=number,
        weight=spec.weight,
        contribution=spec.weight * number,
        grad_norm=norm,
        grad_norm_weighted=None if norm is None else spec.weight * norm,
        metrics=metrics,
    )


def _grad_norm(value: Tensor, tensors: Sequence[Tensor]) -> float | None:
    """Norm of dvalue/dlogprobs over the whole batch. Keeps the graph for the pass that trains."""
    import torch

    gradients = torch.autograd.grad(value, list(tensors), retain_graph=True, allow_unused=True)
    squares = [float(g.double().square().sum()) for g in gradients if g is not None]
    return math.sqrt(math.fsum(squares))


# ---------------------------------------------------------------------------------- running terms


class _Term:
    """A term being computed, and where its answer or its error will be."""

    def __init__(self, kind: str, spec: RegularizerSpec, data: Any, logprobs: Any) -> None:
        self.kind = kind
        self.spec = spec
        self._arguments = (data, logprobs)
        self.answer: Future[_Answer] = Future()

    def run(self) -> None:
        spec = self.spec
        try:
            with events.span(
                "regularizer.compute", regularizer=spec.name, weight=spec.weight
            ) as span:
                answer = self._compute()
                value = float(answer[0].detach())
                span.add(value=value, contribution=spec.weight * value)
        except BaseException as exc:  # It belongs to the caller's thread, and is raised there.
            self.answer.set_exception(exc)
        else:
            self.answer.set_result(answer)

    def _compute(self) -> _Answer:
        import torch

        with torch.enable_grad():  # Grad mode belongs to a thread; this one may be new.
            answer = self.spec.fn(*self._arguments)
        return check_answer(answer, self.spec.name)


def _run(terms: Sequence[_Term], deadline_s: float | None, timeout_s: float | None) -> None:
    """Run the terms together and wait for them; the first error in their order is raised."""
    if deadline_s is None and len(terms) == 1:
        terms[0].run()
    else:
        for term in terms:
            name = f"tinkex-{term.spec.name}"
            threading.Thread(target=term.run, name=name, daemon=True).start()
    for term in terms:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        name = term.spec.name
        try:
            error = term.answer.exception(left_s)
        except TimeoutError:
            raise RegularizerTimeoutError(
                f"not done after {timeout_s:g} s. Raise timeout_s, or make it faster.", name=name
            ) from None
        if isinstance(error, Exception):
            text = str(error) or type(error).__name__
            raise RegularizerError(f"the {term.kind} failed: {text}", name=name) from error
        if error is not None:
            raise error

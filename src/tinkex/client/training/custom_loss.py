"""Train with a loss written in Python: the arithmetic of a custom loss, without any networking.

A server that knows only cross-entropy can still take the step of any differentiable loss: ask for
the logprobs (`forward_data`), compute the loss and its gradient with respect to them here
(`surrogate`), and send back a cross-entropy whose weights are minus that gradient. Its own gradient
with respect to the model is then, by the chain rule, that of the loss. `finish` puts the user's
numbers into the answer. The TrainingClient makes the calls in between.

torch is imported when a loss is computed, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.contract.losses import TEACHER_LOGPROBS
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.errors import InvalidInputError
from tinkex.regularizers.loss_answer import check_answer
from tinkex.types.data.datum import Datum
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.training.forward_backward import ForwardBackwardOutput

if TYPE_CHECKING:
    import torch

CustomLossFn = Callable[
    [list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, Any]]"
]
"""`fn(data, logprobs) -> (loss, metrics)`, one logprobs tensor per datum, in order."""


@dataclass(frozen=True)
class Surrogate:
    """The value of a custom loss, and the cross-entropy batch that has the same gradient."""

    loss: float
    metrics: Mapping[str, float]
    data: list[Datum]


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """The batch to send to `forward` with `cross_entropy`: targets and weights, nothing else.

    Weights that were not given are zeros: the forward pass needs them only for its own loss.
    """
    if not data:
        raise InvalidInputError("data is empty; give at least one Datum.", path="data")
    return [_cross_entropy_datum(datum, index, None) for index, datum in enumerate(data)]


def surrogate(fn: CustomLossFn, data: Sequence[Datum], logprobs: Sequence[TensorData]) -> Surrogate:
    """Call `fn` on the logprobs and turn its gradient into a cross-entropy batch.

    Args:
        logprobs: Those of the forward pass, one per datum and shaped like its target tokens.

    Raises:
        InvalidInputError: `fn` did not return (finite scalar that depends on every datum's
            logprobs, dict of numbers).
    """
    import torch

    # Fresh leaves, so that the gradient stops at the logprobs.
    tensors = [value.to_torch().requires_grad_(True) for value in logprobs]
    with torch.enable_grad():  # the caller may be inside a no_grad; errors of `fn` pass through
        answer = fn(list(data), tensors)
    loss, metrics = check_answer(answer, getattr(fn, "__name__", type(fn).__name__))
    gradients = logprob_gradients(loss, tensors)
    batch = [
        _cross_entropy_datum(datum, index, -gradient)
        for index, (datum, gradient) in enumerate(zip(data, gradients, strict=True))
    ]
    return Surrogate(float(loss.detach()), metrics, batch)


def finish(output: ForwardBackwardOutput, made: Surrogate) -> ForwardBackwardOutput:
    """The answer of the surrogate's pass with the user's loss and metrics in it.

    `loss:sum` becomes the custom loss; what the server computed moves to `surrogate_loss:sum`.
    """
    metrics = dict(output.metrics)
    if "loss:sum" not in metrics:
        raise KeyError(
            f"the server's answer has no 'loss:sum' metric, only {sorted(metrics)}; "
            "it does not speak this protocol"
        )
    surrogate_loss = metrics.pop("loss:sum")
    metrics |= made.metrics
    metrics |= {"loss:sum": made.loss, "surrogate_loss:sum": surrogate_loss}
    return ForwardBackwardOutput(output.loss_fn_output_type, output.loss_fn_outputs, metrics)


def output_logprobs(output: ForwardBackwardOutput, num_data: int) -> list[TensorData]:
    """The logprobs of a forward pass, one per datum."""
    logprobs = [outputs.get("logprobs") for outputs in output.loss_fn_outputs]
    missing = next((i for i, value in enumerate(logprobs) if value is None), None)
    if missing is not None or len(logprobs) != num_data:
        where = f"output {missing}" if missing is not None else f"{len(logprobs)} outputs"
        raise InvalidInputError(
            f"expected logprobs for each of {num_data} datums, got {where} without them; "
            "the server does not return what a custom loss needs.",
            path="loss_fn_outputs",
        )
    return [value for value in logprobs if value is not None]


def taught_data(data: Sequence[Datum], output: ForwardBackwardOutput) -> list[Datum]:
    """The datums with what their teacher said of the targets."""
    name = TEACHER_LOGPROBS.name
    if any(name not in outputs for outputs in output.loss_fn_outputs):
        raise InvalidInputError("the server did not ask the teacher", path="loss_fn_outputs")
    return [
        Datum(
            datum.model_input,
            {**datum.loss_fn_inputs, name: outputs[name]},
            datum.model_input_spans,
            datum.loss_fn_input_spans,
        )
        for datum, outputs in zip(data, output.loss_fn_outputs, strict=True)
    ]


def logprob_gradients(
    loss: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[np.ndarray[Any, Any]]:
    """dloss/dlogprobs per datum, as float32 arrays."""
    import torch

    gradients = torch.autograd.grad(loss, list(tensors), allow_unused=True)
    arrays = []
    for index, (gradient, tensor) in enumerate(zip(gradients, tensors, strict=True)):
        if gradient is None:
            raise InvalidInputError(
                "the loss does not depend on these logprobs. Use them, or leave the datum out.",
                path=f"logprobs[{index}]",
            )
        if gradient.shape != tensor.shape or not bool(torch.isfinite(gradient).all()):
            bad = int((~torch.isfinite(gradient)).sum())
            raise InvalidInputError(
                f"the gradient has {bad} infinite or NaN values of {gradient.numel()}. "
                "Mask positions before taking log or dividing.",
                path=f"logprobs[{index}]",
            )
        arrays.append(gradient.detach().cpu().to(torch.float32).numpy())
    return arrays


# ------------------------------------------------------------------------------- building batches


def _cross_entropy_datum(datum: Datum, index: int, weights: np.ndarray[Any, Any] | None) -> Datum:
    """Only target tokens, weights and experts; spans of provenance are kept."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise InvalidInputError(
            f"a custom loss needs target_tokens, the datum has {sorted(datum.loss_fn_inputs)}.",
            path=f"data[{index}].loss_fn_inputs",
        )
    if weights is None:
        given = datum.loss_fn_inputs.get("weights")
        sent = given if given is not None else _zeros_like(targets)
    else:
        sent = _weights_like(targets, weights, index)
    experts = datum.loss_fn_inputs.get(ROUTED_EXPERTS)
    inputs = {"target_tokens": targets, "weights": sent}
    return Datum(
        datum.model_input,
        inputs if experts is None else {**inputs, ROUTED_EXPERTS: experts},
        datum.model_input_spans,
        datum.loss_fn_input_spans,
    )


def _zeros_like(targets: TensorData) -> TensorData:
    zeros = np.zeros(targets.array.shape, np.float32)
    return TensorData.wrap(zeros, targets.crow_array, targets.col_array, _dense_shape(targets))


def _weights_like(targets: TensorData, dense: np.ndarray[Any, Any], index: int) -> TensorData:
    """Weights in the layout of the targets: of a sparse tensor only the stored cells travel."""
    expected = _dense_shape(targets)
    if dense.shape != expected:
        raise InvalidInputError(
            f"the server returned logprobs of shape {list(dense.shape)} for target_tokens of shape "
            f"{list(expected)}.",
            path=f"loss_fn_outputs[{index}].logprobs",
        )
    if targets.crow_array is None or targets.col_array is None:
        return TensorData.wrap(np.ascontiguousarray(dense))
    rows = np.repeat(np.arange(expected[0]), np.diff(targets.crow_array))
    stored = np.ascontiguousarray(dense[rows, targets.col_array])
    return TensorData.wrap(stored, targets.crow_array, targets.col_array, expected)


def _dense_shape(tensor: TensorData) -> tuple[int, ...]:
    return tuple(tensor.shape) if tensor.shape is not None else tensor.array.shape

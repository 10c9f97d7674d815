"""Train with a base loss plus regularizers: the call that joins the pipeline to a TrainingClient.

A pipeline is a custom loss, so the passes and their order are those of `custom_calls`. If a term
fails or is overdue, nothing was applied and the client goes on as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tinkex import types
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.options import Options
from tinkex.client.session.holder import Holder
from tinkex.client.training.custom_calls import Forward, Submit, prepare_custom
from tinkex.errors import InvalidInputError
from tinkex.regularizers import CustomLossOutput, Pipeline, RegularizerSpec

if TYPE_CHECKING:
    import torch

    from tinkex.client.training.training_client import TrainingClient


class RegularizedOutput(NamedTuple):
    """The server's result, and the terms that the loss was made of."""

    forward_backward: types.ForwardBackwardOutput
    loss: CustomLossOutput


def prepare_regularized(
    holder: Holder,
    forward: Forward,
    data: Sequence[types.Datum],
    base: Any,
    specs: Sequence[RegularizerSpec],
    options: Options = None,
    **settings: Any,
) -> Submit[RegularizedOutput]:
    """Compute base + sum of weighted regularizers; returns the function that submits the rest."""
    if isinstance(base, str) and base != "cross_entropy":
        raise InvalidInputError(
            f"expected a function fn(data, logprobs) -> (loss, metrics), or 'cross_entropy', the "
            f"one loss that works by its name here; got {base!r}. Write {base!r} as a function of "
            "the logprobs, or call forward_backward for it without regularizers.",
            path="base",
        )
    pipeline = Pipeline(cross_entropy if base == "cross_entropy" else base, specs, **settings)
    terms: list[CustomLossOutput] = []

    def total(batch: Any, logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        loss, output = pipeline.compute(batch, logprobs)
        terms.append(output)
        return loss, output.flat()

    submit_loss = prepare_custom(holder, forward, data, total, options=options)

    def submit(client: TrainingClient) -> APIFuture[RegularizedOutput]:
        backward = submit_loss(client)

        async def result(waiting: Waiting) -> RegularizedOutput:
            waiting.state = "running"
            return RegularizedOutput(await backward, terms[0])

        return client.holder.spawn(result)

    return submit


def cross_entropy(
    data: Sequence[types.Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The base loss named "cross_entropy": -sum of weight * logprob, as the server computes it."""
    import torch

    terms = []
    for index, (datum, tensor) in enumerate(zip(data, logprobs, strict=True)):
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            raise InvalidInputError(
                "cross_entropy needs weights.", path=f"data[{index}].loss_fn_inputs"
            )
        terms.append(-(tensor * weights.to_torch()).sum())
    return torch.stack(terms).sum(), {}

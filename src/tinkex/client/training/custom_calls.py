"""The calls around a loss of the user's own; its arithmetic is in `custom_loss.py` (5.6, 5.7).

A callable runs here: ask for logprobs, compute the gradient, send it back. A traced loss runs on
the server where the server can, in one pass, and here otherwise. Such a call has two halves: one
that waits for logprobs (`prepare_custom`), and one that is submitted in order like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex import types
from tinkex.client.deprecations import warn
from tinkex.client.futures import APIFuture, Waiting
from tinkex.client.http.options import CallLimits, Options, without_key
from tinkex.client.session.holder import Holder
from tinkex.client.training.custom_loss import (
    finish,
    forward_data,
    output_logprobs,
    surrogate,
    taught_data,
)
from tinkex.client.training.loss_tracing import (
    LossHandle,
    check_loss_inputs,
    encode_graph,
    run_handle,
    trace_loss,
)
from tinkex.contract.losses import TEACHER_LOGPROBS
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.client.training.training_client import TrainingClient

T = TypeVar("T")
Forward = Callable[[Sequence[types.Datum], str | None, Options], types.ForwardBackwardOutput]
"""Runs the forward pass of a batch, and of its teacher, and waits for the logprobs."""
Submit = Callable[["TrainingClient"], APIFuture[T]]
"""Submits the second half of a custom loss to a run; never waits."""


def prepare_custom(
    holder: Holder,
    forward: Forward,
    data: Sequence[types.Datum],
    loss_fn: Any,
    *,
    teacher: str | None = None,
    loss_type_input: str | None = None,
    options: Options = None,
) -> Submit[types.ForwardBackwardOutput]:
    """Compute a custom loss as far as it runs here; returns the function that submits the rest.

    Waits for `forward` when the loss runs here. `holder` is that of the run to be trained.
    """
    if loss_type_input is not None:
        _check_loss_type(loss_type_input)
    if isinstance(loss_fn, LossHandle):
        if loss_fn.session_id != holder.session_id:
            raise InvalidInputError(
                f"this LossHandle belongs to session {loss_fn.session_id!r}, and the client to "
                f"{holder.session_id!r}. Create the loss with the same ServiceClient.",
                path="loss_fn",
            )
        if loss_fn.loss_id is not None:
            filled = [TEACHER_LOGPROBS.name] if teacher is not None else []
            check_loss_inputs(loss_fn, data, besides=filled)
            config = {"loss_id": loss_fn.loss_id}
            return lambda client: client.forward_backward(
                data, "custom", config, teacher=teacher, options=options
            )
        loss_fn = functools.partial(run_handle, loss_fn)
    if isinstance(loss_fn, str):
        raise InvalidInputError(
            f"expected a function fn(data, logprobs) -> (loss, metrics), got {loss_fn[:100]!r}. A "
            "loss that is known by its name is for forward_backward.",
            path="loss_fn",
        )
    if not callable(loss_fn):
        raise InvalidInputError(
            f"expected a callable or a LossHandle, got {type(loss_fn).__name__}", path="loss_fn"
        )
    return _run_here(forward, list(data), loss_fn, teacher, options)


def _check_loss_type(loss_type_input: str) -> None:
    warn("loss_type_input is deprecated and has no effect.")
    if loss_type_input != "logprobs":
        raise InvalidInputError(
            f"only 'logprobs' exists, got {loss_type_input!r}", path="loss_type_input"
        )


def _run_here(
    forward: Forward,
    data: list[types.Datum],
    fn: Callable[..., Any],
    teacher: str | None,
    options: Options,
) -> Submit[types.ForwardBackwardOutput]:
    output = forward(forward_data(data), teacher, without_key(options))
    if teacher is not None:
        data = taught_data(data, output)
    stand_in = surrogate(fn, data, output_logprobs(output, len(data)))

    def submit(client: TrainingClient) -> APIFuture[types.ForwardBackwardOutput]:
        backward = client.forward_backward(stand_in.data, "cross_entropy", options=options)

        async def finished(waiting: Waiting) -> types.ForwardBackwardOutput:
            return finish(await backward, stand_in)

        return client.holder.spawn(finished)

    return submit


def create_custom_loss(
    holder: Holder,
    fn: Callable[..., Any],
    input_ranks: Mapping[str, int],
    options: Options = None,
) -> APIFuture[LossHandle]:
    """Trace a loss and, where the server takes traced losses, upload it."""
    # A malformed loss is refused here and now; the session it will belong to may not exist yet.
    traced = trace_loss(fn, input_ranks, "")

    async def create(waiting: Waiting) -> LossHandle:
        assert holder.session_id is not None
        handle = replace(traced, session_id=holder.session_id)
        if not holder.flags.custom_loss_server_side:
            return handle
        if (known := holder.session.custom_losses.get(handle.key)) is not None:
            raise InvalidInputError(
                f"this session already has the loss {known!r} with the same graph; use its handle",
                path="fn",
            )
        holder.session.custom_losses[handle.key] = handle.name
        request = types.CreateCustomLossRequest(
            session_id=holder.session_id,
            custom_loss_seq_id=holder.session.next_number("custom_loss"),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=types.CustomLossGraph.model_validate(encode_graph(handle)),
        )
        try:
            kind = types.CreateCustomLossResponse
            created = await holder.promised(
                "create_custom_loss", request, kind, waiting, options=options
            )
        except BaseException:
            del holder.session.custom_losses[handle.key]
            raise
        return replace(handle, loss_id=created.loss_id)

    return holder.spawn(create, CallLimits.of(options))

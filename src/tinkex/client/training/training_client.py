"""Train one model: submit in order, wait in any order.

Every method gives a future: wait with `.result()` or `await` it. The order of calls on one client
is the order in which they were made, from whatever thread; see `training_calls.py` for how a call
travels. Nothing here computes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex import types
from tinkex.client import validation
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.client.http.options import Options
from tinkex.client.older_sdk import DirectFuture
from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.session.holder import Holder
from tinkex.client.tokenizers import Tokenizer, load_tokenizer
from tinkex.client.training.custom_calls import prepare_custom
from tinkex.client.training.pass_requests import EXPECT_FORWARD, EXPECT_FORWARD_BACKWARD
from tinkex.client.training.regularized import RegularizedOutput, prepare_regularized
from tinkex.client.training.train_step import TrainStepResult, skipped_step, whole_step
from tinkex.client.training.training_calls import TrainingCalls
from tinkex.client.training.weights_calls import WeightsCalls
from tinkex.client.twins import awaited, submitted, threaded
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.regularizers import RegularizerSpec
from tinkex.types.account.console_urls import training_run_url
from tinkex.wire.chunking import combine
from tinkex.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinkex.client.session.telemetry import Reporter
    from tinkex.client.training.recovering_client import RecoveringTrainingClient

T = TypeVar("T")


class TrainingClient(WeightsCalls):
    """A model being trained. Made by `ServiceClient.create_lora_training_client` and friends."""

    def __init__(
        self,
        holder: Holder,
        model_seq_id: int,
        model_id: str,
        base_model: str | None = None,
        *,
        calls: TrainingCalls | None = None,
    ) -> None:
        """`calls` submits to the run; a client that shares a run with another shares them too."""
        self.holder = holder
        self.model_seq_id = model_seq_id
        self.model_id = model_id
        self.base_model = base_model
        """As far as the maker of this client was told; `get_info` asks the server."""
        self._calls = calls or TrainingCalls(holder, model_id, self)
        self._lock = self._calls.lock

    def on_queue_state_change(
        self, queue_state: types.QueueState, queue_state_reason: str | None
    ) -> None:
        """Called when the reason of waiting changes; override to react to it."""

    # -- training

    def forward_backward(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        teacher: str | None = None,
        options: Options = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Compute the loss of a batch and add its gradient to what was gathered so far.

        Returns at once. Queue `optim_step` right after it and wait for both together, or use
        `train_step`. A batch larger than the server takes at once travels in chunks; the result is
        that of the whole batch, datums in the order given.

        Args:
            teacher: A base model or a `tinker://` path. The server computes its logprobs at the
                targets and the loss reads them: added to the advantages, or in place of `logprobs`
                in `kl_divergence`. The outputs carry them as `teacher_logprobs`.

        Raises:
            InvalidInputError: The loss or a datum is wrong; nothing was sent.
            NotSupportedError: The server computes no logprobs of teachers (`has_teachers`).
        """
        config = validation.with_teacher(loss_fn_config, teacher)
        parts = self._calls.pass_parts(data, loss_fn, config, forward_only=False)
        return self._calls.submit(
            "forward_backward", parts, EXPECT_FORWARD_BACKWARD, combine, options=options
        )

    forward_backward_async = submitted(forward_backward)

    def forward(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        teacher: str | None = None,
        options: Options = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Compute the loss of a batch; no gradient is gathered. `teacher`: `forward_backward`."""
        config = validation.with_teacher(loss_fn_config, teacher)
        parts = self._calls.pass_parts(data, loss_fn, config, forward_only=True)
        return self._calls.submit("forward", parts, EXPECT_FORWARD, combine, options=options)

    forward_async = submitted(forward)

    @property
    def has_teachers(self) -> bool:
        """Whether the server takes `teacher=`. Ours does; for others ask a sampling client."""
        return self.holder.flags.tinkex_teacher

    def optim_step(
        self,
        optim_params: types.OptimParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
        options: Options = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """Apply the gradients gathered so far, then clear them.

        Returns at once. Calls on one client run in the order they were made, so queue this right
        after `forward_backward` and wait for both results together.

        Raises:
            InvalidInputError: A number is out of range; nothing was sent.
            RequestFailedError: The server could not run the step. Raised by `result()`, never here.
        """
        params = validation.check_optim_params(optim_params, adam_params)
        request = types.OptimStepRequest(optim_params=params, model_id=self.model_id)
        with self._lock:
            self._calls.note_step()
            number = self._calls.steps.asked()
            future = self._calls.submit_json(
                "optim_step", request, types.OptimStepResponse, options=options
            )
        future.add_done_callback(lambda done: self._count_step(number, done))
        return future

    def _count_step(self, number: int, done: Future[types.OptimStepResponse]) -> None:
        if not done.cancelled() and done.exception() is None:
            step = (done.result().metrics or {}).get("step:max")
            if step is not None:
                self._calls.steps.told(number, step)

    optim_step_async = submitted(optim_step)

    def train_step(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        optim_params: types.OptimParams,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        teacher: str | None = None,
        skip_without_signal: bool = False,
        samples: Sequence[types.SampledSequence | None] | None = None,
        max_age_steps: int | None = None,
        drop_stale: bool = False,
        options: Options = None,
    ) -> APIFuture[TrainStepResult]:
        """`forward_backward` and `optim_step`, submitted together: one whole training step.

        Nothing is sent when either half is wrong, so a refused step leaves no gradient behind.

        Args:
            teacher: As in `forward_backward`.
            skip_without_signal: When every advantage is zero, only compute the loss: nothing is
                gathered, no step is made, and the metrics have `skipped:max` 1.
            samples: The sampled sequence that each datum was made from, None for one that was not
                sampled. The metrics then say how many steps ago their weights were frozen
                (`sample_age_steps:mean` and `:max`).
            max_age_steps: Refuse the step when a sample is older than this, or does not say.
            drop_stale: Leave such datums out instead; `samples_dropped:sum` counts them.
        """
        validation.check_optim_params(optim_params, None)
        data = list(data)
        ages: dict[str, float] = {}
        if samples is not None:
            fresh = self._calls.steps.fresh(
                data, samples, max_age_steps=max_age_steps, drop_stale=drop_stale
            )
            data, ages = [data[index] for index in fresh.kept], fresh.metrics
        elif max_age_steps is not None:
            raise InvalidInputError("needs `samples`, which say how old they are", path="samples")
        loss_fn_config = validation.with_teacher(loss_fn_config, teacher)
        if skip_without_signal and teacher is None and not validation.has_signal(data):
            loss = self.forward(data, loss_fn, loss_fn_config, options=options)
            return skipped_step(loss, ages)
        with self._lock:
            loss = self.forward_backward(data, loss_fn, loss_fn_config, options=options)
            step = self.optim_step(optim_params, options=_of_second(options))
        return whole_step(loss, step, ages)

    train_step_async = submitted(train_step)

    def forward_backward_custom(
        self,
        data: Sequence[types.Datum],
        loss_fn: Any,
        *,
        teacher: str | None = None,
        loss_type_input: str | None = None,
        options: Options = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Gather the gradient of a loss of your own: a callable on logprobs, or a LossHandle.

        A callable `fn(data, logprobs) -> (loss, metrics)` runs here, in torch: the call waits for a
        forward pass, then submits the backward one. A LossHandle (see `create_custom_loss`) runs
        on the server in one pass where the server can. The logprobs of a `teacher` are given to it
        with the data, as the input `teacher_logprobs`.
        """
        submit = prepare_custom(
            self.holder,
            self._forward_result,
            data,
            loss_fn,
            teacher=teacher,
            loss_type_input=loss_type_input,
            options=options,
        )
        return submit(self)

    forward_backward_custom_async = threaded(forward_backward_custom)

    def forward_backward_reverse_kl(
        self,
        data: Sequence[types.Datum],
        reference_model_path: str,
        *,
        temperature: float = 1.0,
        options: Options = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Gather the gradient of the KL from this model to a reference, at targets it has sampled.

        `forward_backward(data, "reverse_kl", teacher=reference_model_path)` under the name that
        MinT gives it: `target_tokens` and `weights` are needed, nothing else. Model and reference
        read the same input, at temperature 1.

        Raises:
            NotSupportedError: Another temperature, or a server that computes no teachers.
        """
        if temperature != 1.0:
            raise NotSupportedError(
                f"logprobs are those of temperature 1, got {temperature!r}; leave it out",
                path="temperature",
            )
        if not isinstance(reference_model_path, str) or not reference_model_path:
            raise InvalidInputError(
                f"must be a tinker:// path or a base model, got {reference_model_path!r}",
                path="reference_model_path",
            )
        return self.forward_backward(
            data, "reverse_kl", teacher=reference_model_path, options=options
        )

    forward_backward_reverse_kl_async = submitted(forward_backward_reverse_kl)

    def forward_backward_regularized(
        self,
        data: Sequence[types.Datum],
        base: Any,
        specs: Sequence[RegularizerSpec],
        *,
        parallel: bool = True,
        timeout_s: float | None = 30.0,
        track_grad_norms: bool = False,
        options: Options = None,
    ) -> APIFuture[RegularizedOutput]:
        """Gather the gradient of `base` plus weighted regularizers: base + sum_i weight_i * reg_i.

        `base` is `fn(data, logprobs) -> (loss, metrics)` or "cross_entropy"; the result is the pair
        (ForwardBackwardOutput, CustomLossOutput). Like `forward_backward_custom` it waits for a
        forward pass, computes here, and submits the backward one.

        Raises:
            RegularizerError: A term failed or was overdue. Nothing was applied.
        """
        submit = prepare_regularized(
            self.holder,
            self._forward_result,
            data,
            base,
            specs,
            parallel=parallel,
            timeout_s=timeout_s,
            track_grad_norms=track_grad_norms,
            options=options,
        )
        return submit(self)

    forward_backward_regularized_async = threaded(forward_backward_regularized)

    def _forward_result(
        self, data: Sequence[types.Datum], teacher: str | None, options: Options
    ) -> types.ForwardBackwardOutput:
        """The logprobs that a loss of the user's own is computed from; waits for them."""
        return self.forward(data, "cross_entropy", teacher=teacher, options=options).result()

    # -- asking

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None, *, options: Options = None
    ) -> APIFuture[None]:
        """Have numbers of your own drawn on the run's page of the console. Returns at once.

        Args:
            step: Where on the x axis; the last step the server has seen when left out.
        """
        row = ENDPOINTS["log_metrics"]
        request = row.request(model_id=self.model_id, metrics=dict(metrics), step=step)

        async def send(waiting: Waiting) -> None:
            await self.holder.post(row.name, request, row.result, options=options, waiting=waiting)

        return self.holder.spawn(send)

    log_metrics_async = awaited(log_metrics)

    def log_settings(
        self, settings: Mapping[str, Any], *, options: Options = None
    ) -> APIFuture[types.TrainingRun]:
        """Tell the server what this run was started with, such as its hyperparameters.

        The console shows and compares them. Returns at once. Calls add up: a setting of the same
        name is replaced, the others stay. Values are JSON; what is not, such as a path, is kept
        as text. Tinkex servers only.
        """
        kept = json.loads(json.dumps(dict(settings), default=str))
        return RestClient(self.holder).describe_run(self.model_id, settings=kept, options=options)

    log_settings_async = awaited(log_settings)

    def get_info(self, *, options: Options = None) -> DirectFuture[types.GetInfoResponse]:
        """The server's description of this model."""
        return DirectFuture.of(self._info(options), "get_info", types.GetInfoResponse)

    get_info_async = awaited(get_info)

    def _info(self, options: Options) -> APIFuture[types.GetInfoResponse]:
        request = types.GetInfoRequest(model_id=self.model_id)
        return self.holder.spawn(
            lambda waiting: self.holder.post(
                "get_info", request, types.GetInfoResponse, options=options, waiting=waiting
            )
        )

    def get_tokenizer(self, *, options: Options = None) -> DirectFuture[Tokenizer]:
        """The tokenizer of the base model; the first call may download it."""
        pending_info = self._info(options)

        mirrors = self.holder.config.tokenizer_mirrors

        async def load(waiting: Waiting) -> Tokenizer:
            info = await pending_info
            name = info.model_data.model_name or info.model_name or ""
            tokenizer_id = info.model_data.tokenizer_id
            return await asyncio.to_thread(
                load_tokenizer, name, tokenizer_id=tokenizer_id, mirrors=mirrors
            )

        return DirectFuture.of(spawn(load), "get_tokenizer")

    get_tokenizer_async = awaited(get_tokenizer)

    def unload_model(self, *, options: Options = None) -> APIFuture[types.UnloadModelResponse]:
        """Free the model's memory on the server. Saved checkpoints stay."""
        request = types.UnloadModelRequest(model_id=self.model_id)
        kind = types.UnloadModelResponse
        return self.holder.spawn(
            lambda waiting: self.holder.promised(
                "unload_model", request, kind, waiting, options=options
            )
        )

    unload_model_async = submitted(unload_model)

    def with_recovery(self, policy: RecoveryPolicy | None = None) -> RecoveringTrainingClient:
        """A client with the same methods that outlives this run; see `docs/recovery.md`.

        Make all further calls on it: it repeats its own calls on a new run, not those made here.
        """
        # Here, because that module is built on this one.
        from tinkex.client.training.recovering_client import RecoveringTrainingClient

        return RecoveringTrainingClient(self, policy)

    with_recovery_async = threaded(with_recovery)

    def get_console_url(self) -> str:
        """Where a browser shows this run: at its own server, or the hosted service's console."""
        return training_run_url(self.model_id, self.holder.config.console)

    def get_telemetry(self) -> Reporter | None:
        """The reporter that tells the server of errors; None where telemetry is off."""
        return self.holder.reporter

    def __repr__(self) -> str:
        of = f" of {self.base_model}" if self.base_model else ""
        return f"<{type(self).__name__} {self.model_id}{of} at {self.holder.config.base_url}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "A TrainingClient belongs to the process that made it. Save the state and make a new "
            "client there, or pickle a SamplingClient."
        )


def _of_second(options: Options) -> Options:
    """The options of the second of two calls: a key is that of one."""
    key = (options or {}).get("idempotency_key")
    return (
        options if options is None or key is None else {**options, "idempotency_key": f"{key}-step"}
    )


if TYPE_CHECKING:

    class TrainingClientFuture(DirectFuture[TrainingClient], TrainingClient):
        """For type checkers: await it, ask for its result, or use it as the client."""

else:
    TrainingClientFuture = DirectFuture

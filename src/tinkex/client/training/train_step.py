"""One whole training step: its result, and the future that joins its two halves."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

from tinkex import types
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """The results of one `train_step`."""

    forward_backward: types.ForwardBackwardOutput
    optim_step: types.OptimStepResponse
    ages: Mapping[str, float] = field(default_factory=dict)
    """How old the samples are that it trained on, when it was told which."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of both halves, and ages; a name they share is the optimizer's."""
        halves = {**self.forward_backward.metrics, **(self.optim_step.metrics or {})}
        return {**halves, **self.ages}

    def to_dict(self) -> dict[str, Any]:
        """The value as plain Python objects, ready for `json.dumps`."""
        halves = {
            "forward_backward": self.forward_backward.to_dict(),
            "optim_step": self.optim_step.to_dict(),
        }
        return {**halves, "ages": dict(self.ages)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """The value that `to_dict` wrote.

        Raises:
            InvalidInputError: It is no such value.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("ages", {}), Mapping):
            raise InvalidInputError(f"not a {cls.__name__}: {value!r:.200}")
        return cls(
            types.ForwardBackwardOutput.from_dict(value.get("forward_backward", {})),
            types.OptimStepResponse.from_dict(value.get("optim_step", {})),
            dict(value.get("ages", {})),
        )

    @property
    def loss(self) -> float | None:
        """`loss:sum` of the batch, before the step."""
        return self.forward_backward.metrics.get("loss:sum")

    @property
    def loss_fn_outputs(self) -> list[dict[str, types.TensorData]]:
        return self.forward_backward.loss_fn_outputs


def whole_step(
    loss: APIFuture[types.ForwardBackwardOutput],
    step: APIFuture[types.OptimStepResponse],
    ages: Mapping[str, float],
) -> APIFuture[TrainStepResult]:
    """Join the futures of both halves, which were submitted side by side."""

    async def both(waiting: Waiting) -> TrainStepResult:
        waiting.state = "queued"
        try:
            return TrainStepResult(await loss, await step, ages)
        finally:
            step.cancel()  # no effect once it ended; else nobody would hear its error

    def go_on(ended: Future[Any]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            future.follow(step)

    future = spawn(both)
    future.follow(loss)  # status() tells what the half that runs now waits for
    loss.add_done_callback(go_on)  # not by `both`, which may end before spawn() returns
    return future


def skipped_step(
    loss: APIFuture[types.ForwardBackwardOutput], ages: Mapping[str, float]
) -> APIFuture[TrainStepResult]:
    """The step of a batch without signal: its loss is computed, and nothing is applied."""

    async def without_step(waiting: Waiting) -> TrainStepResult:
        skipped = types.OptimStepResponse(metrics={"skipped:max": 1.0})
        return TrainStepResult(await loss, skipped, ages)

    future = spawn(without_step)
    future.follow(loss)
    return future

"""The result of one whole training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinkex import types


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

    @property
    def loss(self) -> float | None:
        """`loss:sum` of the batch, before the step."""
        return self.forward_backward.metrics.get("loss:sum")

    @property
    def loss_fn_outputs(self) -> list[dict[str, types.TensorData]]:
        return self.forward_backward.loss_fn_outputs

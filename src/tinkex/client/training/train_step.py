"""The result of one whole training step."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex import types

__all__ = ["TrainStepResult"]


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """What one `train_step` did."""

    forward_backward: types.ForwardBackwardOutput
    optim_step: types.OptimStepResponse

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of both halves; a name they share is the optimizer's."""
        return {**self.forward_backward.metrics, **(self.optim_step.metrics or {})}

    @property
    def loss(self) -> float | None:
        """`loss:sum` of the batch, before the step."""
        return self.forward_backward.metrics.get("loss:sum")

    @property
    def loss_fn_outputs(self) -> list[dict[str, types.TensorData]]:
        return self.forward_backward.loss_fn_outputs

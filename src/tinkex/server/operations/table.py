"""Every operation there is. To add one, write its class and name it here; its route follows."""

from __future__ import annotations

from typing import Any

from tinkex.server.operations.models import CreateModel, LoadWeights
from tinkex.server.operations.operation import Operation, Tools
from tinkex.server.operations.optim_step import OptimStep
from tinkex.server.operations.passes import Forward, ForwardBackward
from tinkex.server.operations.saves import SaveWeights, SaveWeightsExternal, SaveWeightsForSampler

OPERATIONS: tuple[type[Operation[Any]], ...] = (
    ForwardBackward,
    Forward,
    OptimStep,
    CreateModel,
    LoadWeights,
    SaveWeights,
    SaveWeightsForSampler,
    SaveWeightsExternal,
)


def make_operations(tools: Tools) -> dict[str, Operation[Any]]:
    """The operations by name."""
    return {operation.name: operation(tools) for operation in OPERATIONS}

"""A pass over training examples: what is asked, and what comes back per example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinkex.types.datum import Datum
from tinkex.types.identifiers import ModelID
from tinkex.types.loss import LossFnOutput


@dataclass(frozen=True)
class ForwardBackwardInput:
    """Examples, the name of a loss, and its settings."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None = None


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """Compute the loss and gather its gradient."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True)
class ForwardRequest:
    """Compute the loss only; no gradient is gathered."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Per-example outputs in the order the examples were given, and metrics of the whole batch.

    Metric names end in how chunks of one batch were combined: `loss:sum`, `entropy:mean`.
    """

    loss_fn_output_type: str = ""
    loss_fn_outputs: list[LossFnOutput] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

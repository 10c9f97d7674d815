"""What a named loss makes of a datum: checked tensors in, values per target out.

The declarations are `contract.losses`, the formulas `formulas`. A loss sees the trainer's logprobs
and the datum's inputs in one shape, never logits, models or packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkex.contract.losses import Loss
from tinkex.engine.jobs import TracedLoss, TrainDatum
from tinkex.engine.metrics import Gap
from tinkex.engine.train.data import Limits, read_datum
from tinkex.engine.train.formulas import FORMULAS, Settings, sampled

Inputs = Mapping[str, Tensor]


def loss_values(loss: Loss, logp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The loss of each target; `weights` multiply every loss that has no other use for them."""
    values = FORMULAS[loss.name].values(logp, inputs, settings)
    if "weights" in inputs and not loss.weighs_itself:
        values = values * inputs["weights"]
    return values


GAP_INPUTS = frozenset({"logprobs", "advantages"})
"""What `gap_metrics` reads of a datum."""


def gap_metrics(logp: Tensor, inputs: Inputs) -> Gap | None:
    """Compare with the datum's `logprobs`, where a sampler produced the token."""
    if logp.ndim != 1 or "logprobs" not in inputs:
        return None
    gap = (logp - inputs["logprobs"])[sampled(inputs)].double()
    if gap.numel() == 0:
        return None
    k3 = gap.exp() - gap - 1
    return Gap(float(gap.abs().sum()), float(gap.abs().max()), float(k3.sum()), gap.numel())


# ---------------------------------------------------------------------------------------- checks


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked datum as tensors; see `DatumArrays`."""

    tokens_T: Tensor
    targets: Tensor
    inputs: Inputs
    active_T: Tensor
    """False where no gradient can arise, whatever the model says."""
    experts_TLk: Tensor | None = None


def prepare(datum: TrainDatum, loss: Loss | TracedLoss, *, path: str, limits: Limits) -> Prepared:
    """Check one datum against its loss and the model, and turn it into tensors.

    Raises:
        InvalidInputError: Names the field, the value and what is allowed.
    """
    checked = read_datum(datum, loss, path=path, limits=limits)
    inputs = {name: torch.from_numpy(array) for name, array in checked.inputs.items()}
    active = torch.ones(checked.targets.shape, dtype=torch.bool)
    for gate in loss.gates if isinstance(loss, Loss) else ():
        if gate.name in inputs:
            active &= inputs[gate.name] != 0
    return Prepared(
        torch.from_numpy(checked.tokens_T),
        torch.from_numpy(checked.targets),
        inputs,
        active if active.ndim == 1 else active.any(dim=1),
        None if checked.experts_TLk is None else torch.from_numpy(checked.experts_TLk),
    )

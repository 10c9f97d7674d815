"""The optimizers: the numbers of one step of each, with their ranges and defaults.

A class here is both the declaration and the value that travels to an engine. How a step is computed
is `engine.optim.updates`. A norm to clip at of 0 means no clipping; the norm is reported either
way. Weight decay is decoupled: weights shrink by learning_rate * weight_decay before the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from tinkex.contract.bounds import Between
from tinkex.contract.settings import check, read, shown
from tinkex.errors import InvalidInputError, NotSupportedError

# A step is computed in float32. Beyond these numbers it would overflow half-way, when moments and
# weights have changed already, or an `eps` would be 0.
Rate: TypeAlias = Annotated[float, Between(0, 1_000_000), "How far a step goes."]
Decay: TypeAlias = Annotated[float, Between(0, 1_000_000), "Decoupled weight decay."]
ClipNorm: TypeAlias = Annotated[float, Between(0), "Gradient norm to clip at; 0: no clipping."]
Fraction: TypeAlias = Annotated[float, Between(0, below=1)]
Epsilon: TypeAlias = Annotated[float, Between(1e-30, 1e30)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerParams:
    """The numbers of one step, of whichever optimizer."""

    optimizer: ClassVar[str]
    """The name on the wire, in checkpoints and in `optimizer_config`."""
    learning_rate: Rate
    weight_decay: Decay = 0.0
    grad_clip_norm: ClipNorm = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams(OptimizerParams):
    """AdamW: bias-corrected moments, decoupled weight decay (Loshchilov and Hutter, 2019)."""

    optimizer = "adamw"
    learning_rate: Rate = 1e-4
    beta1: Annotated[Fraction, "Decay of the first moment."] = 0.9
    beta2: Annotated[Fraction, "Decay of the second moment."] = 0.95
    eps: Annotated[Epsilon, "Keeps untouched weights from 0/0."] = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonParams(OptimizerParams):
    """Muon: momentum, each matrix of it replaced by its nearest orthogonal one (Jordan, 2024)."""

    optimizer = "muon"
    momentum: Annotated[Fraction, "Decay of the momentum."] = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class LionParams(OptimizerParams):
    """Lion: each weight moves by the learning rate, in the direction of a momentum (Chen, 2023)."""

    optimizer = "lion"
    learning_rate: Rate = 1e-4
    beta1: Annotated[Fraction, "How much of the momentum is in the direction."] = 0.9
    beta2: Annotated[Fraction, "Decay of the momentum."] = 0.99


OPTIMIZERS: Mapping[str, type[OptimizerParams]] = {
    declared.optimizer: declared for declared in (AdamParams, MuonParams, LionParams)
}
UNDEFINED: Mapping[str, str] = {
    "dimuon": "dimuon's update rule is not public: the hosted service's pages name its settings "
    "only, so it is not offered here"
}
"""Names of the hosted service that nobody outside it can compute, and why."""


def find_optimizer(name: Any, path: str) -> type[OptimizerParams]:
    """The declaration of a named optimizer.

    Raises:
        NotSupportedError: There is none of that name.
    """
    declared = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if declared is None:
        why = UNDEFINED.get(name) if isinstance(name, str) else None
        raise NotSupportedError(
            f"{why or f'no optimizer {shown(name)}'}; use {' or '.join(OPTIMIZERS)}.", path=path
        )
    return declared


def read_params(name: str, given: Mapping[str, Any], path: str) -> OptimizerParams:
    """The numbers of a step of the named optimizer, complete and checked."""
    declared = find_optimizer(name, f"{path}.type")
    # None is how a client leaves a field out.
    numbers = {key: value for key, value in given.items() if key != "type" and value is not None}
    return read(declared, numbers, of=f"optimizer {name!r}", path=path)


def check_params(name: str, params: OptimizerParams) -> None:
    """Refuse numbers that no step may be taken with, or those of another optimizer."""
    if params.optimizer != name:
        raise InvalidInputError(
            f"the model was created with optimizer {name!r}; got parameters of "
            f"{params.optimizer!r}",
            path="optim_params",
        )
    check(params, path="optim_params")

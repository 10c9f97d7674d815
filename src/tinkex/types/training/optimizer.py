"""Optimizers: which one a model trains with, and the numbers of one step.

Ranges and defaults are those that `contract.optimizers` declares.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    model_validator,
)

from tinkex.contract import optimizers
from tinkex.types.fields.bounds import MAX_PARTS, Id, Name, SeqId, plain
from tinkex.types.fields.message import Metrics, Request, Response

__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "LionOptimizerConfig",
    "LionParams",
    "MuonOptimizerConfig",
    "MuonParams",
    "OptimParams",
    "OptimParamsBase",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfig",
    "OptimizerConfigBase",
]

_ADAM = optimizers.AdamParams()
_MUON = optimizers.MuonParams(learning_rate=0.0)
_LION = optimizers.LionParams()


class OptimizerConfigBase(Request):
    """An optimizer family by name; fields of families unknown here are kept."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"maxProperties": MAX_PARTS})

    type: Name


class AdamOptimizerConfig(OptimizerConfigBase, extra="forbid"):
    """AdamW, the default."""

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(OptimizerConfigBase, extra="forbid"):
    """Dimuon, a hosted optimizer."""

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


class AdamParams(Request):
    """An AdamW step. Weight decay is decoupled; `grad_clip_norm` 0 means no clipping."""

    learning_rate: optimizers.Rate = _ADAM.learning_rate
    beta1: optimizers.Fraction = _ADAM.beta1
    beta2: optimizers.Fraction = _ADAM.beta2
    eps: optimizers.Epsilon = _ADAM.eps
    weight_decay: optimizers.Decay = _ADAM.weight_decay
    grad_clip_norm: optimizers.ClipNorm = _ADAM.grad_clip_norm


class OptimParamsBase(Request):
    """Step parameters of an optimizer family by name; unknown families keep their fields."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"maxProperties": MAX_PARTS})

    type: Name


class DimuonParams(OptimParamsBase, extra="forbid"):
    """A Dimuon step."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = Field(ge=0)
    grad_clip_norm: float = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)


class MuonParams(OptimParamsBase, extra="forbid"):
    """A Muon step, an optimizer of Tinkex servers."""

    type: Literal["muon"] = "muon"
    learning_rate: optimizers.Rate
    momentum: optimizers.Fraction = _MUON.momentum
    weight_decay: optimizers.Decay = _MUON.weight_decay
    grad_clip_norm: optimizers.ClipNorm = _MUON.grad_clip_norm


class MuonOptimizerConfig(OptimizerConfigBase, extra="forbid"):
    """Muon, computed by Tinkex servers; the hosted service refuses it."""

    type: Literal["muon"] = "muon"


class LionParams(OptimParamsBase, extra="forbid"):
    """A Lion step, an optimizer of Tinkex servers."""

    type: Literal["lion"] = "lion"
    learning_rate: optimizers.Rate = _LION.learning_rate
    beta1: optimizers.Fraction = _LION.beta1
    beta2: optimizers.Fraction = _LION.beta2
    weight_decay: optimizers.Decay = _LION.weight_decay
    grad_clip_norm: optimizers.ClipNorm = _LION.grad_clip_norm


class LionOptimizerConfig(OptimizerConfigBase, extra="forbid"):
    """Lion, computed by Tinkex servers; the hosted service refuses it."""

    type: Literal["lion"] = "lion"


_CONFIGS = {
    each.model_fields["type"].default: each for each in OptimizerConfigBase.__subclasses__()
}
_PARAMS = {each.model_fields["type"].default: each for each in OptimParamsBase.__subclasses__()}


def _config_by_family(value: Any) -> Any:
    """Parsed JSON goes to the class its `type` names; an unknown family keeps all its fields.

    A field that a known family does not have is refused, because leaving it out would train
    another model.
    """
    if not isinstance(value, dict):
        return value
    family = plain(value).get("type")
    model = _CONFIGS.get(family) if isinstance(family, str) else None
    return (model or OptimizerConfigBase).model_validate(value, strict=True)


def _params_by_family(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    family = value.get("type")
    if family is None:
        return AdamParams.model_validate(value, strict=True)
    model = _PARAMS.get(family) if isinstance(family, str) else None
    if model is None:  # whose fields are kept, whatever they are
        return OptimParamsBase.model_validate(plain(value), strict=True)
    return model.model_validate(value, strict=True)


OptimizerConfig: TypeAlias = Annotated[
    SerializeAsAny[OptimizerConfigBase], BeforeValidator(_config_by_family)
]
OptimParams: TypeAlias = Annotated[
    AdamParams | SerializeAsAny[OptimParamsBase], BeforeValidator(_params_by_family)
]
_PARAM_NAMES = ("optim_params", "adam_params", "optimizer_params")


class OptimStepRequest(Request):
    """Apply the gathered gradients. `adam_params` and `optimizer_params` are accepted names too."""

    optim_params: OptimParams = Field(validation_alias=AliasChoices(*_PARAM_NAMES))
    model_id: Id
    seq_id: SeqId | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = [name for name in _PARAM_NAMES if value.get(name) is not None]
        if len(given) != 1:
            names = ", ".join(_PARAM_NAMES)
            raise ValueError(f"expected exactly one of {names}; got {given or 'none of them'}")
        unused = set(_PARAM_NAMES).difference(given)  # a null beside the one that counts
        return {key: item for key, item in value.items() if key not in unused}

    @property
    def adam_params(self) -> AdamParams | None:
        """The parameters when they are Adam's, as in SDK 0.4.1."""
        return self.optim_params if isinstance(self.optim_params, AdamParams) else None


class OptimStepResponse(Response):
    """Metrics of the step, such as the gradient norm before clipping."""

    metrics: Metrics | None = None

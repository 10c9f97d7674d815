"""One training example: a model input and the numbers its loss needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tinkex.contract.losses import LOSSES
from tinkex.errors import InvalidInputError
from tinkex.types.data.loss import LossFnInputs
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.provenance import (
    ProvenanceSpan,
    ProvenanceSpans,
    check_tiling,
    checked_spans,
    span_from_dict,
    span_to_dict,
)
from tinkex.types.data.tensor_data import TensorData, TensorDtype, from_list
from tinkex.types.fields.value import Value, nest, short

# A list carries no dtype of its own, so its name decides, as the losses declare it.
LIST_DTYPES = {
    each.name: TensorDtype(each.dtype) for loss in LOSSES.values() for each in loss.inputs
}
_SPARSE_KEYS = frozenset({"target_tokens", "weights"})


MAX_INPUTS, MAX_NAME = 64, 256


class Datum(Value):
    """A training example. `loss_fn_inputs` is a dict you may change; the rest is frozen.

    Each loss input may be a list, a numpy array, a torch tensor or a `TensorData`, and is converted
    here. 2-D torch `weights` and `target_tokens` become sparse when that is smaller.
    """

    _FIELDS = ("model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans")
    __slots__ = _FIELDS
    model_input: ModelInput
    loss_fn_inputs: LossFnInputs
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any] | None = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            model_input = _model_input(model_input)
        inputs = {name: _tensor(name, v) for name, v in (loss_fn_inputs or {}).items()}
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidInputError(
                "give both model_input_spans and loss_fn_input_spans, or neither",
                path="model_input_spans",
            )
        if model_input_spans is not None and loss_fn_input_spans is not None:
            model_input_spans = checked_spans(model_input_spans, path="model_input_spans")
            loss_fn_input_spans = checked_spans(loss_fn_input_spans, path="loss_fn_input_spans")
        self._fill(model_input, inputs, model_input_spans, loss_fn_input_spans)

    @classmethod
    def wrap(cls, model_input: ModelInput, loss_fn_inputs: LossFnInputs) -> Self:
        """Take parts that are already checked, without a copy."""
        return cls._make(model_input, loss_fn_inputs, None, None)

    def with_provenance(
        self, model_input: Sequence[ProvenanceSpan], loss_fn_inputs: Sequence[ProvenanceSpan]
    ) -> Self:
        """A copy that says where its tokens came from. The spans must tile the tokens exactly."""
        check_tiling(model_input, self.model_input.length, path="model_input")
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.array.ndim == 1 and not targets.is_sparse:
            check_tiling(loss_fn_inputs, targets.array.size, path="loss_fn_inputs")
        return type(self)(
            self.model_input, self.loss_fn_inputs, list(model_input), list(loss_fn_inputs)
        )

    def __repr__(self) -> str:
        text = f"Datum(model_input={self.model_input!r}, loss_fn_inputs={self.loss_fn_inputs!r}"
        if self.model_input_spans is not None:
            text += f", model_input_spans={self.model_input_spans!r}"
            text += f", loss_fn_input_spans={self.loss_fn_input_spans!r}"
        return text + ")"

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        inputs = value.get("loss_fn_inputs")
        if not isinstance(inputs, dict):
            raise InvalidInputError("expected an object", path="loss_fn_inputs")
        if not isinstance(value.get("model_input"), dict):
            raise InvalidInputError("expected an object", path="model_input")
        return cls(
            value["model_input"],
            inputs,
            _spans(value, "model_input_spans"),
            _spans(value, "loss_fn_input_spans"),
        )

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        inputs = {
            "type": "object",
            "additionalProperties": TensorData._schema(),
            "maxProperties": MAX_INPUTS,
            "propertyNames": {"maxLength": MAX_NAME},
        }
        properties = {"model_input": ModelInput._schema(), "loss_fn_inputs": inputs}
        return cls._object_schema(properties, ["model_input"])

    def to_dict(self) -> dict[str, Any]:
        inputs = {name: tensor.to_dict() for name, tensor in self.loss_fn_inputs.items()}
        plain: dict[str, Any] = {
            "loss_fn_inputs": inputs,
            "model_input": self.model_input.to_dict(),
        }
        for name in ("model_input_spans", "loss_fn_input_spans"):
            if (spans := getattr(self, name)) is not None:
                plain[name] = [span_to_dict(span) for span in spans]
        return plain


def _spans(value: dict[str, Any], name: str) -> ProvenanceSpans | None:
    listed = value.get(name)
    if listed is None:
        return None
    if not isinstance(listed, list):
        raise InvalidInputError(f"expected a list, got {short(listed)}", path=name)
    spans = []
    for index, item in enumerate(listed):
        try:
            spans.append(span_from_dict(item))
        except InvalidInputError as exc:
            raise nest(exc, f"{name}[{index}]") from exc
    return spans


def _model_input(value: object) -> ModelInput:
    if not isinstance(value, dict):
        raise InvalidInputError(
            f"expected a ModelInput, got {type(value).__name__}. Use ModelInput.from_ints(tokens).",
            path="model_input",
        )
    try:
        return ModelInput._from_dict(value)
    except InvalidInputError as exc:
        raise nest(exc, "model_input") from exc


def _tensor(name: str, value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    try:
        return _convert(name, value)
    except InvalidInputError as exc:
        path = exc.path.removeprefix("data")  # the caller wrote a bare list, not `.data`
        text = str(exc).removeprefix(f"{exc.path}: ")
        if name == "logprobs" and isinstance(value, list) and value[:1] == [None]:
            text += ". The first token of compute_logprobs has none: leave it out with [1:]."
        raise nest(InvalidInputError(text, path=path), f"loss_fn_inputs.{name}") from exc


def _convert(name: str, value: Any) -> TensorData:
    if isinstance(value, (list, tuple)):
        if (dtype := LIST_DTYPES.get(name)) is None:
            raise InvalidInputError(
                f"no named loss has such an input; they have {', '.join(LIST_DTYPES)}. For a loss "
                "of your own give a numpy array, a torch tensor or a TensorData: a list has no "
                "dtype."
            )
        return from_list(value, dtype)
    if isinstance(value, np.ndarray):
        return TensorData.from_numpy(value)
    if hasattr(value, "detach"):
        if value.ndim == 2 and name in _SPARSE_KEYS:
            return TensorData.from_torch_sparse(value)
        return TensorData.from_torch(value)
    if isinstance(value, dict):
        return TensorData._from_dict(value)
    raise InvalidInputError(
        f"expected a list, numpy array, torch tensor or TensorData, got {type(value).__name__}"
    )

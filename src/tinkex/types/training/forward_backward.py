"""A pass over training examples: what is asked, and what comes back per example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from tinkex.contract.cost import NOTHING
from tinkex.errors import InvalidInputError
from tinkex.types.data.datum import MAX_INPUTS, MAX_NAME, Datum
from tinkex.types.data.loss import LossFnOutput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.fields.given import NOT_GIVEN, remember_field
from tinkex.types.fields.identifiers import ModelID
from tinkex.types.fields.value import Value, nest, short

MAX_DATUMS, MAX_SETTINGS = 65_536, 64
MAX_MODEL_ID, MAX_SETTING = 512, 1024
"""Most characters of an id, of the name of a loss, an input or a setting, and of a setting."""


class ForwardBackwardInput(Value):
    """Examples, the name of a loss, and its settings."""

    _FIELDS = ("data", "loss_fn", "loss_fn_config")
    __slots__ = (*_FIELDS, "_as_given")
    data: list[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = NOT_GIVEN,
    ) -> None:
        self._fill(list(data), loss_fn, remember_field(self, loss_fn_config))

    def check_bounds(self) -> None:
        """Refuse what no honest batch has: the last look of both readers of the wire."""
        config = self.loss_fn_config or {}
        _limit(len(self.data), MAX_DATUMS, "datums", "data")
        _limit(len(self.loss_fn), MAX_NAME, "characters", "loss_fn")
        _limit(len(config), MAX_SETTINGS, "settings", "loss_fn_config")
        for name, value in config.items():
            _limit(len(name), MAX_NAME, "characters in a name", "loss_fn_config")
            if isinstance(value, str):
                _limit(len(value), MAX_SETTING, "characters", f"loss_fn_config.{name}")
        for index, datum in enumerate(self.data):
            inputs = datum.loss_fn_inputs
            if len(inputs) > MAX_INPUTS or any(len(name) > MAX_NAME for name in inputs):
                raise InvalidInputError(
                    f"at most {MAX_INPUTS} inputs with names of {MAX_NAME} characters",
                    path=f"data[{index}].loss_fn_inputs",
                )

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        listed, config = value.get("data"), value.get("loss_fn_config")
        if not isinstance(listed, list):
            raise InvalidInputError("expected a list", path="data")
        if not isinstance(value.get("loss_fn"), str):
            raise InvalidInputError("expected text", path="loss_fn")
        if not isinstance(config, dict | None):
            raise InvalidInputError("expected an object", path="loss_fn_config")
        data = []
        for index, item in enumerate(listed):
            try:
                data.append(Datum._validate(item))
            except InvalidInputError as exc:
                raise nest(exc, f"data[{index}]") from exc
        return cls(data, value["loss_fn"], *(() if config is None else (config,)))

    def to_dict(self) -> dict[str, Any]:
        data = [datum.to_dict() for datum in self.data]
        plain: dict[str, Any] = {"data": data, "loss_fn": self.loss_fn}
        if self.loss_fn_config is not None:
            plain["loss_fn_config"] = dict(self.loss_fn_config)
        return plain

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        setting = {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_SETTING}]}
        config = {
            "type": "object",
            "additionalProperties": setting,
            "maxProperties": MAX_SETTINGS,
            "propertyNames": {"maxLength": MAX_NAME},
        }
        properties = {
            "data": {"type": "array", "items": Datum._schema(), "maxItems": MAX_DATUMS},
            "loss_fn": {"type": "string", "maxLength": MAX_NAME},
            "loss_fn_config": {"anyOf": [config, {"type": "null"}]},
        }
        return cls._object_schema(properties, ["data", "loss_fn"])

    def __repr__(self) -> str:
        text = f"ForwardBackwardInput({len(self.data)} datums, loss_fn={self.loss_fn!r}"
        return f"{text}, loss_fn_config={self.loss_fn_config!r})"


def _limit(count: int, most: int, what: str, path: str) -> None:
    if count > most:
        raise InvalidInputError(f"at most {most} {what}, got {count}", path=path)


class _Pass(Value):
    """The request of a pass, with or without gradient."""

    _FIELDS = ("_input", "model_id", "seq_id")
    __slots__ = (*_FIELDS, "_as_given")
    model_id: ModelID
    seq_id: int | None
    _input: ForwardBackwardInput
    _INPUT: ClassVar[str]

    __hash__ = None  # type: ignore[assignment]

    @property
    def input(self) -> ForwardBackwardInput:
        """The input under one name for both kinds of pass."""
        return self._input

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        number = value.get("seq_id")
        if not isinstance(value.get("model_id"), str):
            raise InvalidInputError("expected text", path="model_id")
        if isinstance(number, bool) or not isinstance(number, int | None):
            raise InvalidInputError(f"expected a whole number, got {number!r}", path="seq_id")
        try:
            request = ForwardBackwardInput._validate_object(value.get(cls._INPUT))
        except InvalidInputError as exc:
            raise nest(exc, cls._INPUT) from exc
        return cls._make(request, value["model_id"], number)

    def to_dict(self) -> dict[str, Any]:
        number = {} if self.seq_id is None else {"seq_id": self.seq_id}
        return {self._INPUT: self._input.to_dict(), "model_id": self.model_id, **number}

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        properties = {
            "model_id": {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_ID},
            "seq_id": {
                "type": ["integer", "null"],
                "minimum": 1,
                "maximum": 2**63 - 1,
                "x-becomes": NOTHING,
            },
            cls._INPUT: ForwardBackwardInput._schema(),
        }
        return cls._object_schema(properties, ["model_id", cls._INPUT])

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self._input!r}, model_id={self.model_id!r}, seq_id={self.seq_id!r})"


class ForwardBackwardRequest(_Pass):
    """Compute the loss and gather its gradient."""

    __slots__ = ()
    _INPUT = "forward_backward_input"

    def __init__(
        self,
        forward_backward_input: ForwardBackwardInput,
        model_id: ModelID,
        seq_id: int | None = NOT_GIVEN,
    ) -> None:
        self._fill(forward_backward_input, model_id, remember_field(self, seq_id))

    @property
    def forward_backward_input(self) -> ForwardBackwardInput:
        return self._input


class ForwardRequest(_Pass):
    """Compute the loss only; no gradient is gathered."""

    __slots__ = ()
    _INPUT = "forward_input"

    def __init__(
        self,
        forward_input: ForwardBackwardInput,
        model_id: ModelID,
        seq_id: int | None = NOT_GIVEN,
    ) -> None:
        self._fill(forward_input, model_id, remember_field(self, seq_id))

    @property
    def forward_input(self) -> ForwardBackwardInput:
        return self._input


class ForwardBackwardOutput(Value):
    """Per-example outputs in the order the examples were given, and metrics of the whole batch.

    Metric names end in how chunks of one batch were combined: `loss:sum`, `entropy:mean`.
    """

    _FIELDS = __slots__ = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float]

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        loss_fn_output_type: str = "",
        loss_fn_outputs: Sequence[LossFnOutput] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self._fill(loss_fn_output_type, list(loss_fn_outputs), dict(metrics or {}))

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        listed, metrics = value.get("loss_fn_outputs"), value.get("metrics")
        kind = value.get("loss_fn_output_type", "")
        if not isinstance(kind, str):
            raise InvalidInputError("expected text", path="loss_fn_output_type")
        if not isinstance(listed, list):
            raise InvalidInputError("expected a list", path="loss_fn_outputs")
        if not isinstance(metrics, dict):
            raise InvalidInputError("expected an object", path="metrics")
        outputs = [_output(item, f"loss_fn_outputs[{i}]") for i, item in enumerate(listed)]
        return cls(kind, outputs, {name: _metric(name, number) for name, number in metrics.items()})

    def to_dict(self) -> dict[str, Any]:
        outputs = [
            {name: tensor.to_dict() for name, tensor in item.items()}
            for item in self.loss_fn_outputs
        ]
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": outputs,
            "metrics": self.metrics,
        }

    def __repr__(self) -> str:
        return (
            f"ForwardBackwardOutput(loss_fn_output_type={self.loss_fn_output_type!r}, "
            f"{len(self.loss_fn_outputs)} outputs, metrics={self.metrics!r})"
        )


def _output(item: object, path: str) -> LossFnOutput:
    if not isinstance(item, dict):
        raise InvalidInputError("expected an object", path=path)
    output = {}
    for name, tensor in item.items():
        try:
            output[name] = TensorData._validate_object(tensor)
        except InvalidInputError as exc:
            raise nest(exc, f"{path}.{name}") from exc
    return output


def _metric(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if value is None:
        # orjson, among others, writes NaN as null.
        return float("nan")
    raise InvalidInputError(f"expected a number, got {short(value)}", path=f"metrics.{name}")

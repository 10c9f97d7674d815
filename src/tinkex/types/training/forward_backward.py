"""A pass over training examples: what is asked, and what comes back per example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tinkex.errors import InvalidInputError
from tinkex.types.data.datum import MAX_INPUTS, Datum
from tinkex.types.data.loss import LossFnOutput
from tinkex.types.fields.identifiers import ModelID
from tinkex.types.fields.value import Value, set_field


class _NotGiven:
    """The default of a field whose None is sent as null and whose absence is not (SDK 0.4.1)."""

    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN: Any = _NotGiven()

MAX_DATUMS, MAX_SETTINGS = 65_536, 64
MAX_MODEL_ID, MAX_NAME, MAX_SETTING = 512, 256, 1024
"""Most characters of an id, of the name of a loss, an input or a setting, and of a setting."""


class ForwardBackwardInput(Value):
    """Examples, the name of a loss, and its settings."""

    __slots__ = ("_given", "data", "loss_fn", "loss_fn_config")
    data: list[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None
    _given: bool

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = _NOT_GIVEN,
    ) -> None:
        given = loss_fn_config is not _NOT_GIVEN
        set_field(self, "data", list(data))
        set_field(self, "loss_fn", loss_fn)
        set_field(self, "loss_fn_config", loss_fn_config if given else None)
        set_field(self, "_given", given)

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

    def _content(self) -> tuple[Any, ...]:
        return (self.data, self.loss_fn, self.loss_fn_config)

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        setting = {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_SETTING}]}
        config = {
            "type": "object",
            "additionalProperties": setting,
            "maxProperties": MAX_SETTINGS,
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
    __slots__ = ("_given", "_input", "model_id", "seq_id")
    model_id: ModelID
    seq_id: int | None
    _input: ForwardBackwardInput
    _given: bool
    _INPUT: ClassVar[str]

    __hash__ = None  # type: ignore[assignment]

    def _fill(self, given: ForwardBackwardInput, model_id: ModelID, seq_id: int | None) -> None:
        has_seq_id = seq_id is not _NOT_GIVEN
        set_field(self, "_input", given)
        set_field(self, "model_id", model_id)
        set_field(self, "seq_id", seq_id if has_seq_id else None)
        set_field(self, "_given", has_seq_id)

    @property
    def input(self) -> ForwardBackwardInput:
        """The input under one name for both kinds of pass."""
        return self._input

    def _content(self) -> tuple[Any, ...]:
        return (self._input, self.model_id, self.seq_id)

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        properties = {
            "model_id": {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_ID},
            "seq_id": {"type": ["integer", "null"], "minimum": 1, "maximum": 2**63 - 1},
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
        seq_id: int | None = _NOT_GIVEN,
    ) -> None:
        self._fill(forward_backward_input, model_id, seq_id)

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
        seq_id: int | None = _NOT_GIVEN,
    ) -> None:
        self._fill(forward_input, model_id, seq_id)

    @property
    def forward_input(self) -> ForwardBackwardInput:
        return self._input


class ForwardBackwardOutput(Value):
    """Per-example outputs in the order the examples were given, and metrics of the whole batch.

    Metric names end in how chunks of one batch were combined: `loss:sum`, `entropy:mean`.
    """

    __slots__ = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
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
        set_field(self, "loss_fn_output_type", loss_fn_output_type)
        set_field(self, "loss_fn_outputs", list(loss_fn_outputs))
        set_field(self, "metrics", dict(metrics or {}))

    def _content(self) -> tuple[Any, ...]:
        return (self.loss_fn_output_type, self.loss_fn_outputs, self.metrics)

    def __repr__(self) -> str:
        return (
            f"ForwardBackwardOutput(loss_fn_output_type={self.loss_fn_output_type!r}, "
            f"{len(self.loss_fn_outputs)} outputs, metrics={self.metrics!r})"
        )

"""Turn requests, as they arrive, into what an engine takes, and read the fields of small bodies.

Training data and prompts of both generations are read by `wire`; here its values become arrays for
an engine, without a copy where the types agree, and what a text model cannot take (an image, audio)
is refused by name. Two steps, because a request is numbered even when the rest of it is refused:
`proto_requests.parse` or `load_json` first, then `train_from_proto` or `train_from_json`.

The other bodies are a few JSON fields, read one by one where they are used: a refusal then names
the range as well as the field, and again the number of a request counts before its contents.
Unknown fields are ignored. Whether values make sense for the model is checked in `validation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tinkex.engine.jobs import Array, CsrArray, TrainDatum
from tinkex.errors import InvalidInputError, NotSupportedError, WireError
from tinkex.types.data.chunks import DmelChunk, EncodedTextChunk
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.wire import budget, json_requests, proto_requests
from tinkex.wire.paths import at

MAX_SEQ_ID = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """The work of a forward or forward_backward request of either generation."""

    data: tuple[TrainDatum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]


def load_json(body: bytes) -> dict[str, Any]:
    budget.check_json(body, max_bytes=None)
    try:
        value = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as exc:
        raise WireError(f"the body is not JSON: {exc}.") from exc
    if not isinstance(value, dict):
        raise WireError(f"the body must be a JSON object, got {type(value).__name__}.")
    return value


# ------------------------------------------------------------------------------------ data


def train_from_proto(message: Any) -> TrainRequest:
    """The work in a parsed `ForwardBackwardRequest`. Where its tokens came from is of no use."""
    return _work(proto_requests.read(message, with_spans=False))


def train_from_json(body: dict[str, Any], *, forward_only: bool) -> TrainRequest:
    return _work(json_requests.read("forward" if forward_only else "forward_backward", body))


def prompt_tokens(value: Any, where: str) -> NDArray[np.int64]:
    """The tokens of a JSON ModelInput. Text chunks only."""
    with at(where):
        prompt = ModelInput._validate_object(value)
    return _tokens(prompt, where)


def json_tensor(value: Any, where: str) -> Array | CsrArray:
    """A TensorData in JSON."""
    with at(where):
        return _array(TensorData._validate_object(value))


def _work(request: proto_requests.Pass) -> TrainRequest:
    given = request.input
    config = given.loss_fn_config or {}
    return TrainRequest(
        data=tuple(_datum(index, datum) for index, datum in enumerate(given.data)),
        loss_fn=given.loss_fn,
        loss_fn_config={k: v if isinstance(v, str) else float(v) for k, v in config.items()},
    )


def _datum(index: int, datum: Datum) -> TrainDatum:
    inputs = datum.loss_fn_inputs
    return TrainDatum(
        tokens=_tokens(datum.model_input, f"data[{index}].model_input"),
        inputs={name: _array(inputs[name]) for name in sorted(inputs)},
    )


def _tokens(given: ModelInput, where: str) -> NDArray[np.int64]:
    for index, chunk in enumerate(given.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            what = "dmel audio is" if isinstance(chunk, DmelChunk) else "images are"
            raise NotSupportedError(
                f"{what} not supported by the text models served here; send encoded_text chunks.",
                path=f"{where}.chunks[{index}]",
            )
    return given.to_numpy().astype(np.int64)


def _array(tensor: TensorData) -> Array | CsrArray:
    if tensor.crow_array is None or tensor.col_array is None:
        return tensor.array
    assert tensor.shape is not None
    rows, columns = tensor.shape
    return CsrArray(
        values=tensor.array,
        crow_indices=tensor.crow_array,
        col_indices=tensor.col_array,
        shape=(rows, columns),
    )


# ------------------------------------------------------------------------------------ fields


def text(body: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"must be a non-empty text, got {value!r}", path=name)
    return value


def optional_text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    return None if value is None else text(body, name)


def optional_int(
    body: Mapping[str, Any], name: str, *, low: int = 0, high: int = MAX_SEQ_ID
) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInputError(
            f"must be a whole number from {low} to {high}, got {value!r}", path=name
        )
    return value


def integer(
    body: Mapping[str, Any],
    name: str,
    *,
    default: int | None = None,
    low: int = 0,
    high: int = MAX_SEQ_ID,
) -> int:
    value = optional_int(body, name, low=low, high=high)
    if value is None:
        if default is None:
            raise InvalidInputError("is required", path=name)
        return default
    return value


def number(
    body: Mapping[str, Any], name: str, *, default: float, low: float, high: float = float("inf")
) -> float:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not np.isfinite(value) or not low <= value <= high:
        raise InvalidInputError(
            f"must be a finite number from {low:g} to {high:g}, got {value!r}", path=name
        )
    return float(value)


def boolean(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidInputError(f"must be true or false, got {value!r}", path=name)
    return value


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidInputError(f"must be an object, got {type(value).__name__}", path=name)
    return value

"""Turn training and sampling requests, as they arrive, into what an engine takes.

Both generations end in the same values: protobuf (since 0.19) and JSON (0.4.1 up to 0.25). Packed
arrays become numpy views without a copy where the types agree. Unknown fields are ignored; a field
whose meaning we do not know (an image on a text model, a chunk kind) is refused by name. Whether
values make sense for the model is checked in `validation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tinkex.engine.jobs import Array, CsrArray, TrainDatum
from tinkex.errors import InvalidInputError, NotSupportedError, WireError
from tinkex.wire import budget
from tinkex.wire import tinker_public_pb2 as pb

_DTYPES: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
_JSON_DTYPES: dict[str, Any] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
MAX_SEQ_ID = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A forward or forward_backward request of either generation."""

    model_id: str
    seq_id: int | None
    data: tuple[TrainDatum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool


# ------------------------------------------------------------------------------------ protobuf


def parse_train_proto(body: bytes) -> Any:
    """The message as it arrived, its arrays not yet looked at."""
    budget.check_protobuf(body, budget.REQUEST)
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise WireError(f"the body is not a ForwardBackwardRequest: {exc}.") from exc
    return message


def train_from_proto(message: Any) -> TrainRequest:
    return TrainRequest(
        model_id=message.model_id,
        seq_id=message.seq_id or None,
        data=tuple(_proto_datum(i, datum) for i, datum in enumerate(message.data)),
        loss_fn=message.loss_fn,
        loss_fn_config=_proto_config(message),
        forward_only=message.forward_only,
    )


def _proto_config(message: Any) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidInputError("has neither a number nor a text", path=_config_path(name))
        config[name] = value.number if kind == "number" else value.text
    return config


def _proto_datum(index: int, datum: Any) -> TrainDatum:
    where = f"data[{index}]"
    parts = [_proto_chunk(chunk, f"{where}.model_input") for chunk in datum.model_input]
    inputs = {
        name: _proto_tensor(tensor, f"{where}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return TrainDatum(tokens=_joined(parts), inputs=dict(sorted(inputs.items())))


def _proto_chunk(chunk: Any, where: str) -> NDArray[np.int64]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise _no_such_chunk(str(kind), where)
    return _from_bytes(chunk.encoded_text.tokens, np.dtype("<i4"), where).astype(np.int64)


def _proto_tensor(tensor: Any, where: str) -> Array | CsrArray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise NotSupportedError(
            f"dtype {tensor.dtype} is not accepted; send float32, int64 or int32.", path=where
        )
    shape = list(tensor.shape)
    kind = tensor.WhichOneof("encoding")
    if kind == "sparse_csr":
        csr = tensor.sparse_csr
        return _csr(
            _widened(_from_bytes(csr.values, dtype, where)),
            _from_bytes(csr.crow_indices, np.dtype("<i8"), where),
            _from_bytes(csr.col_indices, np.dtype("<i8"), where),
            shape,
            where,
        )
    return _shaped(_widened(_from_bytes(tensor.dense, dtype, where)), shape or None, where)


def _from_bytes(data: bytes, dtype: np.dtype[Any], where: str) -> Array:
    if len(data) % dtype.itemsize:
        raise WireError(f"{len(data)} bytes are no whole number of {dtype.name}.", path=where)
    return np.frombuffer(data, dtype=dtype)


# ------------------------------------------------------------------------------------ JSON


def load_json(body: bytes) -> dict[str, Any]:
    budget.check_json(body, max_bytes=None)
    try:
        value = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as exc:
        raise WireError(f"the body is not JSON: {exc}.") from exc
    if not isinstance(value, dict):
        raise WireError(f"the body must be a JSON object, got {type(value).__name__}.")
    return value


def train_from_json(body: Mapping[str, Any], *, forward_only: bool) -> TrainRequest:
    field_name = "forward_input" if forward_only else "forward_backward_input"
    given = body.get(field_name)
    if not isinstance(given, dict):
        raise InvalidInputError("must be an object", path=field_name)
    data = given.get("data")
    if not isinstance(data, list):
        raise InvalidInputError("must be a list of datums", path=f"{field_name}.data")
    return TrainRequest(
        model_id=text(body, "model_id"),
        seq_id=optional_int(body, "seq_id"),
        data=tuple(_json_datum(i, datum) for i, datum in enumerate(data)),
        loss_fn=text(given, "loss_fn"),
        loss_fn_config=_json_config(given.get("loss_fn_config")),
        forward_only=forward_only,
    )


def _json_config(value: Any) -> dict[str, float | str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInputError("must be an object", path="loss_fn_config")
    config: dict[str, float | str] = {}
    for name, setting in value.items():
        if isinstance(setting, bool) or not isinstance(setting, int | float | str):
            raise InvalidInputError(
                f"must be a number or a text, got {setting!r}", path=_config_path(name)
            )
        config[name] = setting if isinstance(setting, str) else float(setting)
    return config


def _json_datum(index: int, datum: Any) -> TrainDatum:
    where = f"data[{index}]"
    if not isinstance(datum, dict):
        raise InvalidInputError("must be an object", path=where)
    inputs = datum.get("loss_fn_inputs") or {}
    if not isinstance(inputs, dict):
        raise InvalidInputError("must be an object", path=f"{where}.loss_fn_inputs")
    return TrainDatum(
        tokens=prompt_tokens(datum.get("model_input"), f"{where}.model_input"),
        inputs={
            name: json_tensor(inputs[name], f"{where}.loss_fn_inputs.{name}")
            for name in sorted(inputs)
        },
    )


def prompt_tokens(value: Any, where: str) -> NDArray[np.int64]:
    """The tokens of a JSON ModelInput. Text chunks only."""
    if not isinstance(value, dict) or not isinstance(value.get("chunks"), list):
        raise InvalidInputError("must be an object with a list of chunks", path=where)
    parts = []
    for i, chunk in enumerate(value["chunks"]):
        path = f"{where}.chunks[{i}]"
        if not isinstance(chunk, dict):
            raise InvalidInputError("must be an object", path=path)
        kind = chunk.get("type", "encoded_text")
        if kind != "encoded_text":
            raise _no_such_chunk(str(kind), path)
        parts.append(_json_array(chunk.get("tokens"), np.dtype("<i8"), f"{path}.tokens"))
    return _joined(parts)


def json_tensor(value: Any, where: str) -> Array | CsrArray:
    """A TensorData in JSON: flat data, dtype, and shape or CSR indices."""
    if not isinstance(value, dict):
        raise InvalidInputError("must be a tensor object", path=where)
    dtype = _JSON_DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise InvalidInputError(
            f"must be float32 or int64, got {value.get('dtype')!r}", path=f"{where}.dtype"
        )
    data = _json_array(value.get("data"), dtype, f"{where}.data")
    shape = value.get("shape")
    if shape is not None:
        shape = [int(n) for n in _json_array(shape, np.dtype("<i8"), f"{where}.shape")]
    crow, col = value.get("sparse_crow_indices"), value.get("sparse_col_indices")
    if crow is None and col is None:
        return _shaped(data, shape, where)
    indices = [_json_array(part, np.dtype("<i8"), where) for part in (crow, col)]
    return _csr(data, indices[0], indices[1], shape or [], where)


def _json_array(value: Any, dtype: np.dtype[Any], where: str) -> Array:
    if not isinstance(value, list):
        raise InvalidInputError(
            f"must be a list of numbers, got {type(value).__name__}", path=where
        )
    if not value:
        return np.zeros(0, dtype=dtype)
    try:
        array = np.array(value)
        if array.ndim == 1 and array.dtype.kind in ("i" if dtype.kind == "i" else "if"):
            with np.errstate(over="ignore"):
                cast: Array = array.astype(dtype)
            if np.isfinite(cast).all() or not np.isfinite(array).all():
                return cast
    except (OverflowError, ValueError):
        pass
    raise InvalidInputError(_first_misfit(value, dtype), path=where)


def _first_misfit(value: list[Any], dtype: np.dtype[Any]) -> str:
    wanted = int if dtype.kind == "i" else (int, float)
    for i, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, wanted):
            return f"item {i} must be a number for {dtype.name}, got {str(item)[:80]!r}"
    return f"some numbers do not fit {dtype.name}"


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


# ------------------------------------------------------------------------------------ arrays


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _widened(array: Array) -> Array:
    return array.astype(np.int64) if array.dtype == np.int32 else array


def _shaped(array: Array, shape: list[int] | None, where: str) -> Array:
    if shape is None:
        return array
    if any(n < 0 for n in shape) or int(np.prod(shape, dtype=object)) != array.size:
        raise InvalidInputError(
            f"shape {shape} does not fit {array.size} values", path=f"{where}.shape"
        )
    return array.reshape(shape)


def _csr(values: Array, crow: Array, col: Array, shape: list[int], where: str) -> CsrArray:
    if len(shape) != 2 or any(n < 0 for n in shape):
        raise InvalidInputError(f"a sparse tensor is 2-D, got shape {shape}", path=where)
    rows, columns = shape
    well_formed = (
        len(crow) == rows + 1
        and len(col) == len(values)
        and crow[0] == 0
        and crow[-1] == len(values)
        and bool((np.diff(crow) >= 0).all())
        and (len(col) == 0 or (int(col.min()) >= 0 and int(col.max()) < columns))
    )
    if not well_formed:
        raise InvalidInputError(
            f"row and column indices do not describe {len(values)} cells of shape {shape}",
            path=where,
        )
    return CsrArray(values=values, crow_indices=crow, col_indices=col, shape=(rows, columns))


def _config_path(name: str) -> str:
    return f"loss_fn_config.{name}"


def _no_such_chunk(kind: str, where: str) -> InvalidInputError:
    if kind in ("image", "image_asset_pointer"):
        return NotSupportedError(
            "images are not supported by the text models served here; send encoded_text chunks.",
            path=where,
        )
    if kind == "dmel":
        return NotSupportedError(
            "dmel audio is not supported by the text models served here; send encoded_text chunks.",
            path=where,
        )
    return InvalidInputError(f"chunk type {kind!r} is unknown; send encoded_text.", path=where)

"""Training data as JSON, as SDKs up to 0.18 send it, both ways.

Reading takes parsed JSON, not bytes: a server looks at the number of a request before it judges the
rest. Numbers come as flat lists, tokens as integers, and `true` is no number. Prompts and tensors
of sample requests have the same form and are read here as well.
"""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from tinkex.errors import InvalidInputError, WireError
from tinkex.types._value import nest, short
from tinkex.types.data.chunks import EncodedTextChunk
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.training.forward_backward import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinkex.wire import json_codec
from tinkex.wire.paths import at
from tinkex.wire.tensors import check_cells, check_finite

Pass = ForwardBackwardRequest | ForwardRequest
PASSES: dict[str, type[ForwardRequest] | type[ForwardBackwardRequest]] = {
    "forward": ForwardRequest,
    "forward_backward": ForwardBackwardRequest,
}
INPUT_FIELD = {"forward": "forward_input", "forward_backward": "forward_backward_input"}

# ------------------------------------------------------------------------------------ writing


def encode(name: str, request: Pass) -> bytes:
    """A pass as SDK 0.4.1 writes it."""
    given = request.input
    inner: dict[str, Any] = {"data": [], "loss_fn": str(given.loss_fn)}
    for datum in given.data:
        inner["data"].append(json_codec.plain_v04(datum))
    if given._given:
        inner["loss_fn_config"] = given.loss_fn_config and dict(given.loss_fn_config)
    outer: dict[str, Any] = {INPUT_FIELD[name]: inner, "model_id": request.model_id}
    if request._given:
        outer["seq_id"] = request.seq_id
    return json_codec.dumps_v04(outer)


# ------------------------------------------------------------------------------------ reading


def read(name: str, body: dict[str, Any]) -> Pass:
    """The pass in a parsed body.

    Raises:
        WireError: With the path of the first thing that is wrong.
    """
    field = INPUT_FIELD[name]
    inner = body.get(field)
    if not isinstance(inner, dict):
        raise WireError(f"expected an object, got {short(inner)}", path=field)
    listed = inner.get("data")
    if not isinstance(listed, list):
        raise WireError(f"expected a list of datums, got {short(listed)}", path=f"{field}.data")
    data = []
    for index, item in enumerate(listed):
        with at(f"data[{index}]"):
            data.append(_datum(item))
    loss_fn = _text(inner, "loss_fn")
    given = (
        ForwardBackwardInput(data, loss_fn, _config(inner["loss_fn_config"]))
        if "loss_fn_config" in inner
        else ForwardBackwardInput(data, loss_fn)
    )
    model_id = _text(body, "model_id")
    if "seq_id" not in body:
        return PASSES[name](given, model_id)
    return PASSES[name](given, model_id, _seq_id(body["seq_id"]))


def _datum(item: Any) -> Datum:
    if not isinstance(item, dict):
        raise InvalidInputError(f"expected an object, got {short(item)}")
    inputs = item.get("loss_fn_inputs")
    if inputs is not None and not isinstance(inputs, dict):
        raise InvalidInputError(f"expected an object, got {short(inputs)}", path="loss_fn_inputs")
    with at("model_input"):
        model_input = read_model_input(item.get("model_input"))
    tensors = {}
    for name, value in (inputs or {}).items():
        with at(f"loss_fn_inputs.{name}"):
            tensors[name] = check_finite(read_tensor(value), name)
    return Datum.wrap(model_input, tensors)


def read_model_input(value: Any) -> ModelInput:
    """A prompt or training input from parsed JSON."""
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not isinstance(chunks, list):
        raise InvalidInputError(f"expected an object with a list of chunks, got {short(value)}")
    made = ModelInput(chunks)
    for index, chunk in enumerate(made.chunks):
        if isinstance(chunk, EncodedTextChunk):
            try:
                _check_flat(chunks[index]["tokens"], chunk.tokens_np)
            except InvalidInputError as exc:
                raise nest(exc, f"chunks[{index}].tokens") from exc
    return made


def read_tensor(value: Any) -> TensorData:
    """A tensor from parsed JSON: flat data, dtype, and shape or CSR indices."""
    if not isinstance(value, dict):
        raise InvalidInputError(f"expected a tensor object, got {short(value)}")
    tensor = check_cells(TensorData._from_dict(value))
    try:
        _check_flat(value["data"], tensor.array)
    except InvalidInputError as exc:
        raise nest(exc, "data") from exc
    return tensor


def _check_flat(values: Any, array: NDArray[Any]) -> None:
    """Refuse what became numbers on the way and is none in JSON: true, a list in the list.

    True is packed as 1, so of a long list only a 0 or a 1 is worth a look at every type.
    """
    if not isinstance(values, list):
        raise InvalidInputError(f"expected a list of numbers, got {short(values)}")
    is_long = len(values) > 256 and not isinstance(values[0], list)
    if is_long and not ((array == 0) | (array == 1)).any():
        return
    odd = {bool, list}.intersection(map(type, values))
    if odd:
        index = next(i for i, value in enumerate(values) if type(value) in odd)
        raise InvalidInputError(f"expected a number, got {short(values[index])}", path=f"[{index}]")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise WireError(f"expected text, got {short(value)}", path=name)
    return value


def _config(value: Any) -> dict[str, float | str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise WireError(f"expected an object, got {short(value)}", path="loss_fn_config")
    for key, item in value.items():
        path = f"loss_fn_config.{key}"
        if isinstance(item, bool) or not isinstance(item, int | float | str):
            raise WireError(f"expected a number or text, got {short(item)}", path=path)
        if not isinstance(item, str) and not _is_finite(item):
            raise WireError(f"must be finite, got {short(item)}", path=path)
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def _seq_id(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise WireError(f"expected a number from 0, got {short(value)}", path="seq_id")
    return value

"""Training data as JSON, as SDKs up to 0.18 send it. It takes parsed JSON, not bytes."""

from __future__ import annotations

from typing import Any

from tinkex.contract.settings import is_finite
from tinkex.errors import InvalidInputError
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.fields.bounds import Id, SeqId
from tinkex.types.fields.message import Request
from tinkex.types.fields.value import short
from tinkex.types.training.forward_backward import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinkex.wire import json_codec
from tinkex.wire.paths import at
from tinkex.wire.tensors import check_finite

Pass = ForwardBackwardRequest | ForwardRequest
PASSES: dict[str, type[ForwardRequest] | type[ForwardBackwardRequest]] = {
    "forward": ForwardRequest,
    "forward_backward": ForwardBackwardRequest,
}
INPUT_FIELD = {"forward": "forward_input", "forward_backward": "forward_backward_input"}


class Address(Request):
    """Whose turn in which stream a request is; None takes the next number."""

    model_id: Id
    seq_id: SeqId | None = None


def read(name: str, body: dict[str, Any]) -> Pass:
    """The pass in a parsed body.

    Raises:
        InvalidInputError: With the path of the first thing that is wrong.
    """
    field = INPUT_FIELD[name]
    inner = body.get(field)
    if not isinstance(inner, dict):
        raise InvalidInputError(f"expected an object, got {short(inner)}", path=field)
    listed = inner.get("data")
    if not isinstance(listed, list):
        raise InvalidInputError(
            f"expected a list of datums, got {short(listed)}", path=f"{field}.data"
        )
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
    given.check_bounds()
    address = json_codec.read(Address, body)
    if "seq_id" not in body:
        return PASSES[name](given, address.model_id)
    return PASSES[name](given, address.model_id, address.seq_id)


def _datum(item: Any) -> Datum:
    if not isinstance(item, dict):
        raise InvalidInputError(f"expected an object, got {short(item)}")
    inputs = item.get("loss_fn_inputs")
    if inputs is not None and not isinstance(inputs, dict):
        raise InvalidInputError(f"expected an object, got {short(inputs)}", path="loss_fn_inputs")
    with at("model_input"):
        model_input = ModelInput._validate_object(item.get("model_input"))
    tensors = {}
    for name, value in (inputs or {}).items():
        with at(f"loss_fn_inputs.{name[:80]}"):
            tensors[name] = check_finite(TensorData._validate_object(value), name)
    return Datum.wrap(model_input, tensors)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise InvalidInputError(f"expected text, got {short(value)}", path=name)
    return value


def _config(value: Any) -> dict[str, float | str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidInputError(f"expected an object, got {short(value)}", path="loss_fn_config")
    for key, item in value.items():
        path = f"loss_fn_config.{key[:80]}"
        if isinstance(item, bool) or not isinstance(item, int | float | str):
            raise InvalidInputError(f"expected a number or text, got {short(item)}", path=path)
        if not isinstance(item, str) and not is_finite(item):
            raise InvalidInputError(f"must be finite, got {short(item)}", path=path)
    return value

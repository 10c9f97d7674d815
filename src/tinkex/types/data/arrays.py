"""Turn what a caller has - list, numpy, torch - into one read-only array of a wire dtype.

Lists go through `struct`, which is three times faster than numpy for flat lists of Python numbers.
Every array that leaves this module is a copy the caller cannot change behind our back.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError
from tinkex.types.fields.value import short

_log = logging.getLogger("tinkex.types")
_warned: set[str] = set()
_CODES = {"int32": "i", "int64": "q", "float32": "f"}
_INT32 = np.iinfo(np.int32)


def token_array(tokens: Any, *, path: str = "tokens") -> NDArray[np.int32]:
    """Token ids as a 1-D int32 array, from any sequence, numpy array or torch tensor."""
    if isinstance(tokens, (list, tuple)):
        return pack_flat(tokens, "int32", path=path)
    if not hasattr(tokens, "__array__"):
        if isinstance(tokens, Mapping):  # what transformers' tokenizers return when called
            fix = ". Take its ['input_ids']." if "input_ids" in tokens else ""
            raise InvalidInputError(
                f"expected a list of token ids, got {type(tokens).__name__} with "
                f"{short(list(tokens))}{fix}",
                path=path,
            )
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
            raise InvalidInputError(
                f"expected token ids, got {type(tokens).__name__}. Encode text with a tokenizer.",
                path=path,
            )
        return pack_flat(list(tokens), "int32", path=path)
    array = as_numpy(tokens, path=path)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInputError(
            f"expected a 1-D integer array, got {array.dtype} of shape {list(array.shape)}"
            + (". Take its first row, [0]." if array.ndim == 2 and len(array) == 1 else ""),
            path=path,
        )
    if array.size and array.dtype.itemsize >= 4 and array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise InvalidInputError(
                f"token id {high if high > _INT32.max else low} does not fit in int32", path=path
            )
    return _frozen(array.astype("<i4", copy=True))


def pack_flat(values: list[Any] | tuple[Any, ...], dtype: str, *, path: str) -> NDArray[Any]:
    """A flat list of Python numbers as a read-only array; the first bad element is named."""
    code = _CODES[dtype]
    try:
        raw = struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError, TypeError) as exc:
        raise _bad_element(values, dtype, path) from exc
    return np.frombuffer(raw, dtype=np.dtype(dtype).newbyteorder("<"))


def pack_floats(
    values: list[Any] | tuple[Any, ...], *, path: str
) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
    """A flat list of Python numbers as read-only float32, and as doubles where those differ."""
    try:
        # In the machine's own byte order: struct is faster there.
        raw = struct.pack(f"{len(values)}d", *values)
    except (struct.error, OverflowError, TypeError) as exc:
        raise _bad_element(values, "float32", path) from exc
    doubles = np.frombuffer(raw)
    with np.errstate(over="ignore"):
        floats = _frozen(doubles.astype("<f4"))
    if floats.astype(np.float64).tobytes() == raw:
        return floats, None
    # A number that float32 cannot hold has become infinite; infinity itself is a value.
    if not np.isfinite(floats).all() and (np.isinf(floats) & np.isfinite(doubles)).any():
        raise _bad_element(values, "float32", path)
    return floats, doubles


def check_flat(values: list[Any], array: NDArray[Any], *, path: str) -> None:
    """Refuse what became numbers on the way and is none in JSON: true, a list in the list.

    True is packed as 1, so of a long list only a 0 or a 1 is worth a look at every type.
    """
    is_long = len(values) > 256 and not isinstance(values[0], list)
    if is_long and not ((array == 0) | (array == 1)).any():
        return
    odd = {bool, list}.intersection(map(type, values))
    if odd:
        index = next(i for i, value in enumerate(values) if type(value) in odd)
        shown = short(values[index])
        raise InvalidInputError(f"expected a number, got {shown}", path=f"{path}[{index}]")


def _bad_element(values: Iterable[Any], dtype: str, path: str) -> InvalidInputError:
    code = _CODES[dtype]
    for index, value in enumerate(values):
        try:
            struct.pack(f"<{code}", value)
        except (struct.error, OverflowError, TypeError):
            return InvalidInputError(
                f"expected {dtype} values, got {short(value)} ({type(value).__name__})",
                path=f"{path}[{index}]",
            )
    return InvalidInputError(f"expected {dtype} values", path=path)


def as_numpy(value: Any, *, path: str) -> NDArray[Any]:
    """A numpy view of a numpy array or a detached CPU torch tensor (bfloat16 is widened)."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # torch, without importing it
        value = value.detach()
        if value.device.type != "cpu":
            value = value.cpu()
        # numpy has no bfloat16, and half precision does not travel (contract 7.2).
        if str(value.dtype) in ("torch.bfloat16", "torch.float16"):
            value = value.float()
        result: NDArray[Any] = value.numpy()
        return result
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as exc:
        raise InvalidInputError(f"cannot be read as an array: {exc}", path=path) from exc


def wire_array(array: NDArray[Any], *, path: str) -> NDArray[Any]:
    """A read-only copy in the wire dtype that matches the array's kind."""
    kind = array.dtype.kind
    if kind == "f":
        return _frozen(_to_float32(array))
    if kind == "i":
        return _frozen(array.astype("<i8", copy=True))
    if kind == "u":
        return _frozen(_unsigned_to_int64(array))
    raise InvalidInputError(
        f"dtype {array.dtype} does not travel; only float and integer arrays do. "
        "Convert it first, for example with .astype(np.float32).",
        path=path,
    )


def _to_float32(array: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        narrow = array.astype("<f4", copy=True)
    if array.dtype.itemsize > 4 and not np.array_equal(narrow, array, equal_nan=True):
        _warn_once("float64 values were rounded to float32: the wire carries nothing wider")
    return narrow


def _unsigned_to_int64(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.itemsize == 8 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        _warn_once("uint64 values of 2**63 and more wrapped around to negative int64 values")
    return array.astype("<i8", copy=True)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)

"""Tensors as protobuf fields: raw little-endian bytes, a dtype code and a shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError, WireError
from tinkex.types.data.tensor_data import TensorData
from tinkex.wire import tinker_public_pb2 as pb

_WIDE: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


def dtype_code(array: NDArray[Any]) -> int:
    """The wire's name for float32 or int64."""
    return pb.DTYPE_FLOAT32 if array.dtype.kind == "f" else pb.DTYPE_INT64


def item_size(code: int) -> int:
    """Bytes per element on the wire."""
    return int(_dtype(code).itemsize)


def from_bytes(raw: bytes, code: int) -> NDArray[Any]:
    """A flat read-only array of float32 or int64: int32 is widened, bfloat16 too."""
    dtype = _dtype(code)
    if len(raw) % dtype.itemsize:
        raise WireError(f"{len(raw)} bytes are not a whole number of {dtype.itemsize}-byte values")
    array = np.frombuffer(raw, dtype)
    if code == pb.DTYPE_INT32:
        array = array.astype("<i8")
    elif code == pb.DTYPE_BFLOAT16:
        array = (array.astype("<u4") << 16).view("<f4")
    array.setflags(write=False)
    return array


def _dtype(code: int) -> np.dtype[Any]:
    if code not in _WIDE:
        raise WireError(f"unknown dtype code {code}; send float32, int64 or int32", path="dtype")
    dtype: np.dtype[Any] = _WIDE[code]
    return dtype


def int32s(raw: bytes, *, path: str) -> NDArray[np.int32]:
    """A flat int32 array over the bytes, without a copy."""
    if len(raw) % 4:
        raise WireError(f"{len(raw)} bytes are not a whole number of int32 values", path=path)
    return np.frombuffer(raw, "<i4")


def float32s(raw: bytes, *, path: str) -> NDArray[np.float32]:
    """A flat float32 array over the bytes, without a copy."""
    if len(raw) % 4:
        raise WireError(f"{len(raw)} bytes are not a whole number of float32 values", path=path)
    return np.frombuffer(raw, "<f4")


def decode_tensor(message: Any) -> TensorData:
    """A `Tensor` message as a value. Sizes must fit the bytes exactly."""
    shape = list(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        return _decode_sparse(message, shape)
    array = from_bytes(message.dense, message.dtype)
    return _shaped(array, shape) if shape else TensorData.wrap_flat(array)


def _shaped(array: NDArray[Any], shape: list[int]) -> TensorData:
    # In integers of Python: the product of a stranger's sizes would overflow those of numpy.
    expected = 1
    for size in shape:
        if size < 0:
            raise InvalidInputError(f"sizes must be 0 or more, got {shape}", path="shape")
        expected *= size
    if expected != array.size:
        raise InvalidInputError(f"expected {expected} values for shape {shape}, got {array.size}")
    if len(shape) == 1:
        return TensorData.wrap(array)
    if len(shape) > 32:
        raise InvalidInputError(f"at most 32 dimensions, got {len(shape)}", path="shape")
    return TensorData.wrap(array.reshape(shape))


def _decode_sparse(message: Any, shape: list[int]) -> TensorData:
    csr = message.sparse_csr
    return TensorData(
        from_bytes(csr.values, message.dtype),
        None,
        shape,
        from_bytes(csr.crow_indices, pb.DTYPE_INT64),
        from_bytes(csr.col_indices, pb.DTYPE_INT64),
    )


def check_finite(tensor: TensorData, name: str) -> TensorData:
    """The tensor itself, unless a value in it is NaN or infinite.

    `logprobs` of several candidates per position may hold -inf: a candidate of probability zero.
    """
    if tensor.array.dtype.kind != "f" or np.isfinite(tensor.array).all():
        return tensor
    values = tensor.array.ravel()
    wrong = ~np.isfinite(values)
    if name == "logprobs" and len(tensor.shape or ()) == 2:
        wrong &= values != -np.inf
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise WireError(f"must be finite, got {values[index]}", path=f"[{index}]")
    return tensor


def encode_tensor(tensor: TensorData, message: Any) -> None:
    """Fill a `Tensor` message."""
    if tensor.crow_array is None or tensor.col_array is None:
        message.dense = tensor.array.tobytes()
    else:
        message.sparse_csr.values = tensor.array.tobytes()
        message.sparse_csr.crow_indices = tensor.crow_array.tobytes()
        message.sparse_csr.col_indices = tensor.col_array.tobytes()
    message.dtype = dtype_code(tensor.array)
    message.shape.extend(tensor.shape or ())

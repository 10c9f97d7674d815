"""Read a GGUF file: its metadata, and its tensors as float32 numpy arrays.

The reader maps the file and widens one tensor at a time, so memory stays near the size of what is
asked for. It knows the block layouts of `_FORMATS` and refuses any other by name. It knows nothing
of models, except `unpermute_rope_rows`, which undoes what llama.cpp does to the q and k rows of
Llama-family weights when it writes such a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError, NotSupportedError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


class _Format(NamedTuple):
    """How `block_size` consecutive weights lie in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int
    widen: Callable[[Bytes], Floats]
    """[blocks, block_bytes] -> [blocks, block_size]."""


def _half(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """The low halves of all bytes, then the high halves: the order of the Q4 and Q5 formats."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _fifth_bits(raw: Bytes) -> Floats:
    return np.unpackbits(raw, axis=1, bitorder="little").astype(np.float32) * 16


def _q4_0(raw: Bytes) -> Floats:
    return (_nibbles(raw[:, 2:]) - 8) * _half(raw[:, :2])


def _q4_1(raw: Bytes) -> Floats:
    return _nibbles(raw[:, 4:]) * _half(raw[:, :2]) + _half(raw[:, 2:4])


def _q5_0(raw: Bytes) -> Floats:
    return (_nibbles(raw[:, 6:]) + _fifth_bits(raw[:, 2:6]) - 16) * _half(raw[:, :2])


def _q5_1(raw: Bytes) -> Floats:
    quants = _nibbles(raw[:, 8:]) + _fifth_bits(raw[:, 4:8])
    return quants * _half(raw[:, :2]) + _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32) * _half(raw[:, :2])


def _q6_k(raw: Bytes) -> Floats:
    """256 weights: 128 B of low nibbles, 64 B of high bit pairs, 16 int8 scales, one fp16."""
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).astype(np.float32) - 32
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    scales = scales * _half(raw[:, 208:210])
    return (quants.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


def _bf16(raw: Bytes) -> Floats:
    wide = np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)


_FORMATS = {
    0: _Format("F32", 1, 4, lambda raw: np.ascontiguousarray(raw).view(np.float32)),
    1: _Format("F16", 1, 2, _half),
    2: _Format("Q4_0", 32, 18, _q4_0),
    3: _Format("Q4_1", 32, 20, _q4_1),
    6: _Format("Q5_0", 32, 22, _q5_0),
    7: _Format("Q5_1", 32, 24, _q5_1),
    8: _Format("Q8_0", 32, 34, _q8_0),
    14: _Format("Q6_K", 256, 210, _q6_k),
    30: _Format("BF16", 1, 2, _bf16),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    """Outermost first, as torch has it (the file stores the reverse)."""
    kind: int
    offset: int


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise InvalidInputError(f"the GGUF file ends at byte {len(self.data)}, inside a header")
        self.at += size
        return self.data[self.at - size : self.at].tobytes()

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("<I"), self.scalar("<Q")
            if (code := _SCALARS.get(item_kind)) is not None:
                return np.frombuffer(self.take(struct.calcsize(code) * count), code[1:]).tolist()
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise InvalidInputError(f"unknown GGUF metadata type {kind}; is the file damaged?")
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """An opened file. `metadata` is plain Python; `read` widens a tensor to float32."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._data: Bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self._data)
        if (magic := cursor.take(4)) != _MAGIC:
            raise InvalidInputError(f"{self.path} is not a GGUF file: it starts with {magic!r}")
        if (version := cursor.scalar("<I")) not in (2, 3):
            raise NotSupportedError(f"{self.path} is GGUF version {version}; 2 and 3 are read")
        num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata = {
            cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(num_values)
        }
        self.tensors = dict(self._tensor_info(cursor) for _ in range(num_tensors))
        alignment = int(self.metadata.get("general.alignment", 32))
        self._start = -(-cursor.at // alignment) * alignment

    @staticmethod
    def _tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
        name, num_dims = cursor.string(), cursor.scalar("<I")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
        return name, TensorInfo(shape, cursor.scalar("<I"), cursor.scalar("<Q"))

    def read(self, name: str) -> Floats:
        """Read a tensor, widened to float32, in torch's dimension order."""
        info = self.tensors[name]
        fmt = _FORMATS.get(info.kind)
        if fmt is None:
            raise NotSupportedError(
                f"tensor {name!r} of {self.path} is stored in GGUF type {info.kind}; "
                f"readable: {', '.join(f.name for f in _FORMATS.values())}. Requantize it to Q8_0."
            )
        num_blocks = int(np.prod(info.shape)) // fmt.block_size
        start = self._start + info.offset
        raw = self._data[start : start + num_blocks * fmt.block_bytes]
        if len(raw) != num_blocks * fmt.block_bytes:
            raise InvalidInputError(f"{self.path} ends inside tensor {name!r}; fetch it again")
        return fmt.widen(raw.reshape(num_blocks, fmt.block_bytes)).reshape(info.shape)


def unpermute_rope_rows(rows: Floats, num_heads: int) -> Floats:
    """Undo llama.cpp's interleaving of the two rope halves inside each head's rows."""
    head_size = rows.shape[0] // num_heads
    split = rows.reshape(num_heads, head_size // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)

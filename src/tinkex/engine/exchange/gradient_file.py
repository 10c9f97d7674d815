"""Gradients on their way from one worker to others: named arrays in one file, as in memory.

Written aside and renamed, so that a file is there whole or not at all. It is read once by each of
those who share an adapter, and removed by whoever named it. Not synced: nobody needs it after a
crash. Readers map it: what they add to something else is never copied.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64


def write(path: str | Path, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Write the file and return its size in bytes."""
    target = Path(path)
    aside = target.with_suffix(".part")
    whole: dict[str, Any] = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    head = {name: [str(array.dtype), list(array.shape)] for name, array in whole.items()}
    text = json.dumps(head).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    with aside.open("wb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for array in whole.values():
            if array.size:
                _write_all(file, memoryview(array).cast("B"))
                _write_all(file, bytes(-array.nbytes % _ALIGN))
        size_bytes = file.tell()
    os.replace(aside, target)
    return size_bytes


def _write_all(file: Any, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def read(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file. They may be written to; the file does not change by that."""
    with Path(path).open("rb", buffering=0) as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    at = 8 + int.from_bytes(data[:8], "little")
    arrays: dict[str, NDArray[Any]] = {}
    for name, (kind, shape) in json.loads(data[8:at]).items():
        dtype, count = np.dtype(kind), math.prod(shape)
        if at + count * dtype.itemsize > len(data):
            raise EOFError(f"{Path(path).name} ends too early")
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
        at += -at % _ALIGN
    return arrays

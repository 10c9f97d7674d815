"""Gradients on their way from one worker to others: named arrays in one file, as in memory.

Written aside and renamed, so that a file is there whole or not at all. It is read once by each of
those who share an adapter, and removed by whoever named it. Not synced: nobody needs it after a
crash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write(path: str | Path, arrays: Mapping[str, NDArray[Any]]) -> int:
    """Write the file and return its size in bytes."""
    target = Path(path)
    aside = target.with_suffix(".part")
    whole: dict[str, Any] = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    head = {name: [str(array.dtype), list(array.shape)] for name, array in whole.items()}
    text = json.dumps(head).encode()
    with aside.open("wb", buffering=0) as file:
        left = memoryview(len(text).to_bytes(8, "little") + text)
        for data in (
            left,
            *(memoryview(array).cast("B") for array in whole.values() if array.size),
        ):
            while data:
                data = data[file.write(data) :]
        size_bytes = file.tell()
    os.replace(aside, target)
    return size_bytes


def read(path: str | Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, each its own memory."""
    arrays: dict[str, NDArray[Any]] = {}
    with Path(path).open("rb", buffering=0) as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, (dtype, shape) in head.items():
            array: Any = np.empty(shape, dtype)
            left = memoryview(array).cast("B") if array.size else memoryview(b"")
            while left:
                if not (count := file.readinto(left)):
                    raise EOFError(f"{Path(path).name} ends too early")
                left = left[count:]
            arrays[name] = array
    return arrays

"""What an engine holds in memory, and how memory that nothing needs goes back to the system.

Bytes are those of tensors, each storage counted once. Knows tensors, not what they mean.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine import control_group


def tensor_bytes(*roots: Any) -> int:
    """Bytes of every tensor that can be reached from objects of ours."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.layout == torch.strided and not item.is_meta:
                storage = item.untyped_storage()
                # Views share a storage, which is counted once.
                storages[storage.data_ptr()] = storage.nbytes()
        else:
            waiting.extend(_inside(item))
    return sum(storages.values())


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, list | tuple | set | deque):
        yield from item
    elif isinstance(item, nn.Module):
        yield from item.parameters()
        yield from item.buffers()
    elif type(item).__module__.startswith("tinkex."):
        yield from getattr(item, "__dict__", {}).values()
        for kind in type(item).__mro__:
            for name in getattr(kind, "__slots__", ()):
                yield getattr(item, name, None)


def free_bytes() -> int:
    """The memory of this machine, or of our container, that new allocations can take.

    Free, or held by the file cache.
    """
    left = control_group.free_bytes()
    return _machines() if left is None else min(left, _machines())


def _machines() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def give_back() -> None:
    """Return freed memory to the system, where the system has a way."""
    # Tensors in reference cycles still hold memory.
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):  # another C library than GNU's
            pass


def is_out_of_memory(exc: BaseException) -> bool:
    """On a CPU torch says it with a `RuntimeError` like any other."""
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exc, RuntimeError) and "can't allocate memory" in str(exc)

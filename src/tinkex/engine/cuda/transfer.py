"""Small tensors between the host and its device, without making one wait for the other.

A plain copy to or from CUDA memory waits for everything launched before it. `send` and `Fetch` go
through pinned memory and wait for nothing but the data itself. On a CPU both are plain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, nested lists of them or a numpy array, as a tensor on the device."""
    host = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host
    # From pageable memory the copy would wait for the device, whatever `non_blocking` says.
    # Nothing need hold the pinned tensor: torch reuses its memory only when the copy has ended.
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Tensors on their way to the host, as they are when this is made."""

    def __init__(self, *tensors: Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._host = tensors
            return
        self._host = tuple(_pinned(tensor) for tensor in tensors)
        self._ready = torch.cuda.Event()
        self._ready.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors; waits for them alone, not for what was launched since."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

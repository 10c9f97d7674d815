"""The operations of a CUDA card by torch alone; `kernel_ops` adds Triton's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.collectives.process_group import use_card
from tinkex.engine.cuda.transfer import Fetch, send
from tinkex.engine.numerics.ops import Ops


class CudaOps(Ops):
    """See `Ops`."""

    fills_rows = False
    large_passes = True
    adds_in_product = True
    keeps_pairs = False

    def compute_dtype(self, wanted: torch.dtype | None = None) -> torch.dtype:
        """bf16 on cards that can multiply in it, fp32 on others."""
        return wanted or (torch.bfloat16 if multiplies_bf16(self.device) else torch.float32)

    def use_in_thread(self) -> None:
        """Kernels, streams and events are those of the current card, whatever their tensors."""
        use_card(self.device)

    def make_deterministic(self) -> None:
        """Costs speed. cuBLAS reads its variable at the first product."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Torch would fill each new tensor, lest somebody reads what was never written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def send(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return send(values, self.device, dtype)

    def fetch(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return Fetch(*tensors).wait

    def host_copier(self) -> Callable[[Tensor], Tensor]:
        """The copies wait for nothing that the device is given after this call."""
        launched = torch.cuda.Event()
        launched.record()
        return lambda tensor: _to_host(tensor, launched)


def multiplies_bf16(device: torch.device) -> bool:
    """Cards before Ampere (capability 8) have no bf16 tensor cores; they run in fp32."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 8


def _to_host(tensor: Tensor, launched: torch.cuda.Event) -> Tensor:
    if tensor.device.type != "cuda":  # a copy for which the card had no room, or a group's whole
        return tensor
    try:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # no room that cannot be paged out; slower
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
    # A stream of its own: the copy overlaps with what the engine has launched since.
    stream = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(stream):
        launched.wait()
        host.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return host

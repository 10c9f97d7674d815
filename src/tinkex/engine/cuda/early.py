"""Kernels of a decode step that are launched before the one ahead of them has ended.

A step of few rows is some three hundred short kernels; on Hopper and later a kernel can be put on
the multiprocessors while the one before it is still running, and then waits there (`wait`) for all
that it wrote. That hides the time of a launch. Every kernel waits before it reads or writes what
another one writes or reads, and only then lets the next one come, so what was finished before the
kernel ahead began is finished too. A kernel that does not know of this starts as ever, when the one
before it has ended.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

_FEW = 256
"""Rows of the largest recorded step. Kernels over more are long, and there is nothing to hide."""


@triton.jit
def wait(EARLY: tl.constexpr):
    """For the kernel ahead; the next one may come from here on."""
    # In this order: the next kernel then comes when all before this one have ended, and may read
    # what they wrote even before its own wait.
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launch(num_rows: int, device: torch.device) -> dict[str, Any]:
    """Arguments of a kernel that calls `wait`, for so many rows."""
    if num_rows <= _FEW and _can(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@lru_cache(maxsize=16)
def _can(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] >= 9
        and hasattr(tl.extra.cuda, "gdc_wait")
    )

"""Copies of weights in the block layout of oneDNN, for the small products of decoding on a CPU.

A product of a few rows with a plain weight matrix spends its time on rearranging the matrix; with
a copy arranged beforehand, 4 to 64 rows take two thirds to half of the time (and 4 rows less than
one, so fewer are padded). Only inference mode uses the copies: training keeps its bits whether or
not anyone samples. All in fp32, the same sums in another order. Knows tensors, not models; the
plain product is the oracle.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.numerics.memory_in_use import free_bytes

log = logging.getLogger(__name__)
_ATTRIBUTE = "tinkex_packed"
FEWEST_ROWS = 4
"""Fewer rows take longer than these."""
_TYPICAL_ROWS = 32


def pack(weights: Iterable[Tensor]) -> bool:
    """Give each weight matrix a packed copy, if memory allows; False when there are none.

    The copies live as long as their weights and need as much memory again. They are made only
    while they fit into half of the memory that is free now.
    """
    chosen = [w for w in weights if w.device.type == "cpu" and w.dtype == torch.float32]
    missing = [w for w in chosen if not hasattr(w, _ATTRIBUTE)]
    if not chosen or not torch.backends.mkldnn.is_available():
        return False
    needed_bytes = sum(w.numel() * w.element_size() for w in missing)
    if needed_bytes > free_bytes() // 2:
        log.warning(
            "sampling uses plain weights: packed copies need %d MiB, half of the free memory is "
            "%d MiB",
            needed_bytes >> 20,
            free_bytes() >> 21,
        )
        return False
    with torch.no_grad():
        for weight in missing:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
            setattr(weight, _ATTRIBUTE, packed)
    return True


def held_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes of the copies."""
    return sum(w.numel() * w.element_size() for w in weights if hasattr(w, _ATTRIBUTE))


def unpack(weights: Iterable[Tensor]) -> None:
    """Give the copies up; `pack` makes them again."""
    for weight in weights:
        if hasattr(weight, _ATTRIBUTE):
            delattr(weight, _ATTRIBUTE)


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor | None:
    """x @ weight.T + bias with the packed copy; None where the plain way is to be taken.

    The result may be overwritten; the arguments are not.
    """
    # Training must not use a copy: its sums have another order.
    if not torch.is_inference_mode_enabled():
        return None
    packed = getattr(weight_OI, _ATTRIBUTE, None)
    num_rows = x_TI.shape[0]
    if packed is None or num_rows == 0:
        return None
    if num_rows < FEWEST_ROWS:
        x_TI = F.pad(x_TI, (0, 0, 0, FEWEST_ROWS - num_rows))
    y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias_O, "none", [], "")
    return y_TO[:num_rows] if num_rows < FEWEST_ROWS else y_TO

"""Products on a CPU whose sums do not depend on the number of rows, for deterministic mode.

MKL computes rows in fours; a single row, and what is left over, goes another way and is summed in
another order. So inside `exactly` products are filled up to a multiple of four rows: a row's bits
are then the same in any company.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor

_mode = threading.local()


@contextmanager
def exactly(wanted: bool) -> Iterator[None]:
    """Whether products of this thread are filled up."""
    before, _mode.exact = getattr(_mode, "exact", False), wanted
    try:
        yield
    finally:
        _mode.exact = before


def filled(x_TI: Tensor) -> Tensor:
    """The rows, with rows of zeros behind them if the mode asks for it; else as they are."""
    return fill(x_TI) if getattr(_mode, "exact", False) else x_TI


def fill(x_BTI: Tensor) -> Tensor:
    """The same in any mode, of one matrix or of several."""
    # Four rows are one step of MKL's kernels; zeros behind them change no other row.
    missing = -x_BTI.shape[-2] % 4
    return F.pad(x_BTI, (0, 0, 0, missing)) if missing else x_BTI

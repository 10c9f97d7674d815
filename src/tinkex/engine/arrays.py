"""Arrays of a training datum, dense or as sparse rows: their form, and the dense one of them.

Numpy only, so that server and toy engine read an input as the real engine does.
"""

from __future__ import annotations

import numpy as np

from tinkex.contract.losses import Form
from tinkex.engine.jobs import Array, CsrArray
from tinkex.errors import InvalidInputError


def form_of(value: Array | CsrArray) -> Form:
    """Type and shape of an input, for the checks of the declaration."""
    stored = np.asarray(value.values if isinstance(value, CsrArray) else value)
    shape = value.shape if isinstance(value, CsrArray) else stored.shape
    return Form(stored.dtype.kind in "iu", tuple(shape))


def dense(value: Array | CsrArray, path: str, pad: float = 0.0) -> Array:
    """A CSR array as a dense one; cells not stored are `pad`, or 0 among integers.

    Raises:
        InvalidInputError: The indices do not fit together.
    """
    if not isinstance(value, CsrArray):
        return np.asarray(value)
    rows, columns = value.shape
    counts = np.diff(value.crow_indices)
    stored, cols = np.asarray(value.values), np.asarray(value.col_indices)
    consistent = (
        len(value.crow_indices) == rows + 1
        and (counts >= 0).all()
        and value.crow_indices[0] == 0
        and int(value.crow_indices[-1]) == len(stored) == len(cols)
        and (len(cols) == 0 or (0 <= cols.min() and cols.max() < columns))
    )
    if not consistent:
        raise InvalidInputError(
            f"the sparse indices do not describe shape {value.shape}", path=path
        )
    is_whole = stored.dtype.kind in "iu"
    full = np.full((rows, columns), 0 if is_whole else pad, dtype=stored.dtype)
    full[np.repeat(np.arange(rows), counts), cols] = stored
    return full

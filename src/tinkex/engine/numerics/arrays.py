"""Arrays of a training datum, dense or as sparse rows: their form, size, and the dense one of them.

Numpy only, so that server and toy engine read an input as the real engine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinkex.contract.losses import Form
from tinkex.contract.sparse import (
    BYTES_PER_TOKEN,
    FLAT_BYTES,
    MOST_FOR_TOKENS,
    TIMES_STORED,
    dense_limit,
)
from tinkex.engine.jobs import Array, CsrArray, TrainDatum
from tinkex.errors import InvalidInputError


def form_of(value: Array | CsrArray) -> Form:
    """Type and shape of an input, for the checks of the declaration."""
    stored = np.asarray(value.values if isinstance(value, CsrArray) else value)
    shape = value.shape if isinstance(value, CsrArray) else stored.shape
    return Form(stored.dtype.kind in "iu", tuple(shape))


SparseInputs = dict[int, dict[str, CsrArray]]
"""The sparse inputs of each datum that has any: by its index, then by the path of each."""


def sparse_inputs(data: Sequence[TrainDatum]) -> SparseInputs:
    """The sparse inputs of a request."""
    by_datum = {
        index: {
            f"data[{index}].loss_fn_inputs.{name}": value
            for name, value in datum.inputs.items()
            if isinstance(value, CsrArray)
        }
        for index, datum in enumerate(data)
    }
    return {index: sparse for index, sparse in by_datum.items() if sparse}


def check_dense_bytes(inputs: SparseInputs, num_tokens: Sequence[int]) -> None:
    """Refuse sparse inputs of a request that would take too much memory, before any is made dense.

    All of them together, since they are dense at once; and those of each datum by its own tokens,
    since it goes through one pass.

    Raises:
        InvalidInputError: Names the largest of the inputs, its shape and the limit.
    """
    whole = {path: value for sparse in inputs.values() for path, value in sparse.items()}
    _judge(whole, sum(num_tokens), "request")
    for index, sparse in inputs.items():
        _judge(sparse, num_tokens[index], "datum")


def _judge(sparse: Mapping[str, CsrArray], num_tokens: int, whole: str) -> None:
    limit = dense_limit(num_tokens, sum(map(_stored_bytes, sparse.values())))
    total = sum(map(_dense_bytes, sparse.values()))
    if total <= limit:
        return
    path, largest = max(sparse.items(), key=lambda entry: _dense_bytes(entry[1]))
    raise InvalidInputError(
        f"has shape {list(largest.shape)} with {len(largest.values)} stored values. Made dense, "
        f"the sparse inputs of this {whole} ({len(sparse)}) take {total} bytes, over the limit of "
        f"{limit}: {FLAT_BYTES}, {BYTES_PER_TOKEN} for each token (at most {MOST_FOR_TOKENS}) and "
        f"{TIMES_STORED} times the bytes sent. Give it one column for each candidate of a "
        "position, or send fewer datums.",
        path=path,
    )


def _dense_bytes(value: CsrArray) -> int:
    rows, columns = value.shape
    return int(rows) * int(columns) * np.asarray(value.values).itemsize


def _stored_bytes(value: CsrArray) -> int:
    parts = (value.values, value.crow_indices, value.col_indices)
    return sum(np.asarray(part).nbytes for part in parts)


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

"""Numbers with a dtype and a shape, dense or as sparse rows: what losses take and give.

Only float32 and int64 exist on the wire. The array inside is read-only and never shared with the
caller; torch is imported only by the methods that name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.cost import NOTHING
from tinkex.errors import InvalidInputError
from tinkex.types.data.arrays import as_numpy, check_flat, pack_flat, pack_floats, wire_array
from tinkex.types.fields.given import remember_doubles
from tinkex.types.fields.value import Value, kept, readonly

if TYPE_CHECKING:
    import torch


class TensorDtype(StrEnum):
    """The two element types that travel."""

    INT64 = "int64"
    FLOAT32 = "float32"


MAX_CELLS = 2**28
"""Most cells of a sparse tensor's dense shape: reading it densely must stay possible."""
_FLOAT, _INT = TensorDtype.FLOAT32, TensorDtype.INT64
_NUMPY: dict[TensorDtype, np.dtype[Any]] = {_FLOAT: np.dtype("<f4"), _INT: np.dtype("<i8")}


class _Fields:
    """The storage of a TensorData, not frozen yet.

    Results hold one tensor per datum, and filling plain slots and then turning the object into its
    frozen subclass takes a third of the time of setting frozen fields one by one.
    """

    _FIELDS: ClassVar[tuple[str, ...]] = ("array", "_shape", "_crow", "_col")
    __slots__ = (*_FIELDS, "_as_given", "_data")
    array: NDArray[Any]
    _shape: tuple[int, ...] | None
    _crow: NDArray[np.int64] | None
    _col: NDArray[np.int64] | None


class TensorData(_Fields, Value):
    """An immutable tensor. `data` is its flat list, `array` its numpy array (read-only, no copy).

    With `sparse_crow_indices` and `sparse_col_indices` it is a 2-D tensor in compressed sparse
    rows: `data` holds the stored values only, and absent cells read as the pad value.
    """

    __slots__ = ()

    def __init__(
        self,
        data: Any = None,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Any = None,
        sparse_col_indices: Any = None,
    ) -> None:
        array = self._ingest(data, dtype)
        if sparse_crow_indices is None and sparse_col_indices is None:
            self._fill(*_shaped(array, shape), None, None)
        else:
            crow, col = _indices(sparse_crow_indices, sparse_col_indices)
            self._fill(array, _checked_csr(array, crow, col, shape), crow, col)

    def _ingest(self, data: Any, dtype: str | None) -> NDArray[Any]:
        """The values as a read-only wire array."""
        kind = _parse_dtype(dtype)
        if data is None:
            data = []
        if isinstance(data, (list, tuple)):
            if kind is None:
                raise InvalidInputError("is needed when data is a list", path="dtype")
            if data and isinstance(data[0], (list, tuple, np.ndarray)):
                return _nested(data, kind)
            if kind is _INT:
                return pack_flat(data, kind.value, path="data")
            array, doubles = pack_floats(data, path="data")
            if doubles is not None:
                remember_doubles(self, doubles)
            return array
        given = as_numpy(data, path="data")
        array = wire_array(given, path="data")
        if kind is not None and array.dtype != _NUMPY[kind]:
            if kind is _INT:
                raise InvalidInputError(
                    f"dtype is int64 but the array is {given.dtype}. Round it first.", path="data"
                )
            array = readonly(array.astype("<f4"))
        if given.dtype == np.float64 and not np.array_equal(given, array, equal_nan=True):
            remember_doubles(self, given.flatten())  # a copy: the caller may write to his
        return array

    @classmethod
    def wrap(
        cls,
        array: NDArray[Any],
        crow: NDArray[np.int64] | None = None,
        col: NDArray[np.int64] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Self:
        """Take a float32 or int64 array as it is, without a copy or a check."""
        made = _Fields()
        made.array = array
        made._shape = array.shape if shape is None else shape
        made._crow = crow
        made._col = col
        made.__class__ = cls
        return made  # type: ignore[return-value]

    @classmethod
    def wrap_flat(cls, array: NDArray[Any]) -> Self:
        """Like `wrap`, for a 1-D array that came without a shape."""
        return cls._make(array, None, None, None)

    # -------------------------------------------------------------------------------- reading

    @property
    def dtype(self) -> TensorDtype:
        return _FLOAT if self.array.dtype.kind == "f" else _INT

    @kept
    def data(self) -> list[Any]:
        """The values as a flat list; for a sparse tensor the stored ones. Made on first use."""
        listed: list[Any] = self.array.ravel().tolist()
        return listed

    @property
    def shape(self) -> list[int] | None:
        return None if self._shape is None else list(self._shape)

    @property
    def is_sparse(self) -> bool:
        return self._crow is not None

    @property
    def crow_array(self) -> NDArray[np.int64] | None:
        """Row starts of a sparse tensor as an array (read-only)."""
        return self._crow

    @property
    def col_array(self) -> NDArray[np.int64] | None:
        """Column of each stored value of a sparse tensor as an array (read-only)."""
        return self._col

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        return None if self._crow is None else self._crow.tolist()

    @property
    def sparse_col_indices(self) -> list[int] | None:
        return None if self._col is None else self._col.tolist()

    def to_numpy(self, pad_value: int = 0) -> NDArray[Any]:
        """A dense array of the caller's own; absent cells of a sparse tensor become `pad_value`."""
        if isinstance(pad_value, bool) or not isinstance(pad_value, int):
            raise InvalidInputError(f"expected an int, got {pad_value!r}", path="pad_value")
        if self._crow is None or self._col is None or self._shape is None:
            return self.array.copy()
        dense = np.full(self._shape, pad_value, dtype=self.array.dtype)
        rows = np.repeat(np.arange(self._shape[0]), np.diff(self._crow))
        dense[rows, self._col] = self.array
        return dense

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """A dense torch tensor of the caller's own."""
        import torch

        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """A nested list in the tensor's shape."""
        result: list[Any] = self.to_numpy(pad_value).tolist()
        return result

    # -------------------------------------------------------------------------------- making

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Self:
        """Copy an array: floats become float32, integers int64; the shape is kept."""
        made = cls.__new__(cls)
        copy = made._ingest(np.asarray(array), None)
        made._fill(copy, copy.shape, None, None)
        return made

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Copy a tensor from any device; bfloat16 and float16 are widened."""
        return cls.from_numpy(as_numpy(tensor, path="data"))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """Copy a 2-D tensor, leaving out cells equal to `pad_value` when that is smaller."""
        return cls.from_numpy_sparse(as_numpy(tensor, path="data"), pad_value)

    @classmethod
    def from_numpy_sparse(cls, array: NDArray[Any], pad_value: int = 0) -> Self:
        """Like `from_torch_sparse`, from a numpy array."""
        dense = wire_array(np.asarray(array), path="data")
        if dense.ndim != 2:
            raise InvalidInputError(f"expected a 2-D tensor, got {dense.ndim}-D", path="data")
        rows, cols = np.nonzero(dense != pad_value)
        num_rows, num_cols = dense.shape
        # The rule of the official SDK (contract 7.2).
        if num_rows + 1 + 2 * len(rows) >= num_rows * num_cols:
            return cls.wrap(dense)
        counts = np.bincount(rows, minlength=num_rows)
        crow = np.concatenate(([0], np.cumsum(counts))).astype("<i8")
        values = np.ascontiguousarray(dense[rows, cols])
        return cls.wrap(values, crow, cols.astype("<i8"), (num_rows, num_cols))

    # -------------------------------------------------------------------------------- value

    def _content(self) -> tuple[Any, ...]:
        return (self.dtype, *super()._content())

    def __repr__(self) -> str:
        text = f"TensorData(data={self.data!r}, dtype={str(self.dtype)!r}, shape={self.shape!r}"
        if self.is_sparse:
            text += f", sparse_crow_indices={self.sparse_crow_indices!r}"
            text += f", sparse_col_indices={self.sparse_col_indices!r}"
        return text + ")"

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        names = ("shape", "sparse_crow_indices", "sparse_col_indices")
        data, dtype = value.get("data"), value.get("dtype")
        if not isinstance(data, list):
            raise InvalidInputError(f"expected a list, got {type(data).__name__}", path="data")
        if not isinstance(dtype, str):
            raise InvalidInputError(f"expected 'float32' or 'int64', got {dtype!r}", path="dtype")
        made = cls(data, dtype, *(_listed(value, name) for name in names))
        check_flat(data, made.array, path="data")
        return made

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        def numbers(kind: str, most: int = MAX_CELLS) -> dict[str, Any]:
            items = {"type": kind}
            return {"type": "array", "items": items, "maxItems": most, "x-becomes": NOTHING}

        shape = numbers("integer", 32) | {"x-becomes": "memory_bytes"}  # where it is sparse

        properties = {
            "data": numbers("number"),
            "dtype": {"enum": [str(dtype) for dtype in TensorDtype]},
            "shape": {"anyOf": [shape, {"type": "null"}]},
            "sparse_crow_indices": {"anyOf": [numbers("integer"), {"type": "null"}]},
            "sparse_col_indices": {"anyOf": [numbers("integer"), {"type": "null"}]},
        }
        return cls._object_schema(properties, ["data", "dtype"])

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"data": self.data, "dtype": str(self.dtype)}
        if self._shape is not None:
            fields["shape"] = self.shape
        if self.is_sparse:
            fields["sparse_crow_indices"] = self.sparse_crow_indices
            fields["sparse_col_indices"] = self.sparse_col_indices
        return fields


def from_list(values: list[Any] | tuple[Any, ...], dtype: str) -> TensorData:
    """A flat or nested list in a given dtype; nested lists must be rectangular."""
    made = TensorData.__new__(TensorData)
    array = made._ingest(values, dtype)
    made._fill(array, array.shape, None, None)
    return made


def _listed(value: dict[str, Any], name: str) -> list[Any] | None:
    items = value.get(name)
    if items is not None and not isinstance(items, list):
        raise InvalidInputError(f"expected a list, got {type(items).__name__}", path=name)
    return items


def _parse_dtype(dtype: str | None) -> TensorDtype | None:
    if dtype is None:
        return None
    try:
        return TensorDtype(dtype)
    except ValueError:
        raise InvalidInputError(
            f"expected 'float32' or 'int64', got {dtype!r}", path="dtype"
        ) from None


def _nested(data: list[Any] | tuple[Any, ...], kind: TensorDtype) -> NDArray[Any]:
    try:
        array = np.array(data)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidInputError(
            "nested lists must be rectangular: every row needs the same length", path="data"
        ) from exc
    if array.size and (array.dtype.kind not in "if" or (kind is _INT and array.dtype.kind == "f")):
        raise InvalidInputError(f"expected {kind} values, got {array.dtype}", path="data")
    return readonly(array.astype(_NUMPY[kind]))


def _shaped(
    array: NDArray[Any], shape: Sequence[int] | None
) -> tuple[NDArray[Any], tuple[int, ...] | None]:
    if shape is None:
        return array, None if array.ndim == 1 else array.shape
    sizes = _checked_sizes(shape)
    expected = 1
    for size in sizes:
        expected *= size
    if expected != array.size:
        raise InvalidInputError(
            f"expected {expected} values for shape {list(sizes)}, got {array.size}"
        )
    return array.reshape(sizes), sizes


def _checked_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > 32:
        raise InvalidInputError(f"at most 32 dimensions, got {len(shape)}", path="shape")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise InvalidInputError(f"sizes must be 0 or more, got {list(shape)}", path="shape")
    return tuple(int(size) for size in shape)


def _indices(crow: Any, col: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if crow is None or col is None:
        raise InvalidInputError(
            "a sparse tensor needs both sparse_crow_indices and sparse_col_indices",
            path="sparse_col_indices" if col is None else "sparse_crow_indices",
        )
    return _index_array(crow, "sparse_crow_indices"), _index_array(col, "sparse_col_indices")


def _index_array(values: Any, path: str) -> NDArray[np.int64]:
    if isinstance(values, (list, tuple)):
        return pack_flat(values, "int64", path=path)
    return wire_array(as_numpy(values, path=path).astype(np.int64), path=path).ravel()


def _checked_csr(
    values: NDArray[Any],
    crow: NDArray[np.int64],
    col: NDArray[np.int64],
    shape: Sequence[int] | None,
) -> tuple[int, ...]:
    """The dense shape of a consistent sparse tensor."""
    sizes = _checked_sizes(shape or ())
    if len(sizes) != 2:
        raise InvalidInputError(f"a sparse tensor needs a 2-D shape, got {shape}", path="shape")
    if sizes[0] * sizes[1] > MAX_CELLS:
        raise InvalidInputError(f"{list(sizes)} has more than {MAX_CELLS} cells", path="shape")
    if len(crow) != sizes[0] + 1:
        raise InvalidInputError(
            f"expected {sizes[0] + 1} values, got {len(crow)}", path="sparse_crow_indices"
        )
    if values.ndim != 1 or len(col) != values.size:
        raise InvalidInputError(
            f"expected {values.size} values, got {len(col)}", path="sparse_col_indices"
        )
    if crow[0] != 0 or crow[-1] != values.size or (np.diff(crow) < 0).any():
        raise InvalidInputError(
            f"must rise from 0 to {values.size}, the number of values", path="sparse_crow_indices"
        )
    if col.size and (col.min() < 0 or col.max() >= sizes[1]):
        raise InvalidInputError(
            f"columns must be in 0..{sizes[1] - 1}, got {int(col.min())}..{int(col.max())}",
            path="sparse_col_indices",
        )
    if (twice := _stored_twice(crow, col)) is not None:
        raise InvalidInputError(
            f"row {twice[0]} has column {twice[1]} twice; which value counts?",
            path="sparse_col_indices",
        )
    return sizes


def _stored_twice(crow: NDArray[np.int64], col: NDArray[np.int64]) -> tuple[int, int] | None:
    """A cell (row, column) that has two values, if there is one."""
    falls = np.flatnonzero(np.diff(col) <= 0) + 1  # where a value is not to the right of the last
    if np.isin(falls, crow).all():
        return None  # only where rows begin: columns rise inside each row
    rows = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
    order = np.lexsort((col, rows))  # `np.unique` of pairs takes many times as long, with the GIL
    rows, col = rows[order], col[order]
    twice = np.flatnonzero((rows[1:] == rows[:-1]) & (col[1:] == col[:-1]))
    return None if not len(twice) else (int(rows[twice[0]]), int(col[twice[0]]))

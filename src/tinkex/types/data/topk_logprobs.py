"""The k likeliest tokens at each of n positions, as two rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.sampling import EMPTY_LOGPROB
from tinkex.errors import InvalidInputError
from tinkex.types.fields.value import Value, readonly, set_field, short

_MAX_CELLS = 2**22

TopkList: TypeAlias = list[list[tuple[int, float]] | None]


class TopkLogprobs(Value):
    """`token_ids` (int32) and `logprobs` (float32), both [n, k]; `tolist` gives the plain form."""

    _FIELDS = ("token_ids", "logprobs")
    __slots__ = (*_FIELDS, "_list")
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    _list: TopkList

    def __init__(self, token_ids: Any, logprobs: Any) -> None:
        ids = _rectangle(token_ids, "<i4", "token_ids")
        values = _rectangle(logprobs, "<f4", "logprobs")
        if ids.ndim != 2 or ids.shape != values.shape:
            raise InvalidInputError(
                f"token_ids and logprobs must be 2-D and equal in shape, got {list(ids.shape)} and "
                f"{list(values.shape)}"
            )
        self._fill(readonly(ids), readonly(values))

    @classmethod
    def wrap(cls, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Self:
        """Take two arrays of the right dtype and shape as they are."""
        return cls._make(token_ids, logprobs)

    @classmethod
    def from_list(cls, rows: Sequence[Sequence[Sequence[Any]] | None]) -> Self:
        """From one list of (token id, logprob) per position; None where a position has none."""
        for index, row in enumerate(rows):
            if not isinstance(row, (list, tuple, type(None))):
                raise InvalidInputError(f"expected a list, got {short(row)}", path=f"[{index}]")
        width = max((len(row) for row in rows if row is not None), default=0)
        if len(rows) * width > _MAX_CELLS:
            raise InvalidInputError(f"{len(rows)} rows of {width} are too many to hold densely")
        ids = np.zeros((len(rows), width), "<i4")
        values = np.full((len(rows), width), EMPTY_LOGPROB, "<f4")
        for index, row in enumerate(rows):
            try:
                for column, (token, logprob) in enumerate(row or ()):
                    ids[index, column] = token
                    values[index, column] = logprob
            except (TypeError, ValueError, OverflowError) as exc:
                raise InvalidInputError(
                    f"expected pairs of token id and logprob, got {short(row)}", path=f"[{index}]"
                ) from exc
        return cls.wrap(readonly(ids), readonly(values))

    def tolist(self) -> TopkList:
        """A list of (token id, logprob) per position, empty cells cut; None for an empty row."""
        if not hasattr(self, "_list"):
            set_field(self, "_list", self._rows())
        return self._list

    def _rows(self) -> TopkList:
        if not self.token_ids.size:
            return [None] * len(self.token_ids)
        filled = (self.logprobs != EMPTY_LOGPROB) | (self.token_ids != 0)
        counts = filled.sum(axis=1).tolist()
        ids, values = self.token_ids.tolist(), self.logprobs.tolist()
        return [
            list(zip(ids[i][:count], values[i][:count], strict=True)) if count else None
            for i, count in enumerate(counts)
        ]

    def _content(self) -> tuple[Any, ...]:
        return (self.token_ids.shape, *super()._content())

    def __repr__(self) -> str:
        return f"TopkLogprobs({self.tolist()!r})"

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        return cls(value.get("token_ids"), value.get("logprobs"))

    def to_dict(self) -> dict[str, Any]:
        return {"token_ids": self.token_ids.tolist(), "logprobs": self.logprobs.tolist()}


def _rectangle(rows: Any, dtype: str, path: str) -> NDArray[Any]:
    try:
        with np.errstate(over="ignore"):  # a double that is too large is infinite
            return np.array(rows, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidInputError(
            f"expected rows of numbers, all of one length, got {short(rows)}", path=path
        ) from exc

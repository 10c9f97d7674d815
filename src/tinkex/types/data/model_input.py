"""A prompt or training input: chunks in the order the model sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError
from tinkex.types.data.chunks import (
    CHUNK_SCHEMA,
    EncodedTextChunk,
    ModelInputChunk,
    chunk_from_dict,
)
from tinkex.types.fields.value import Value, nest, set_field

MAX_CHUNKS = 65_536


class ModelInput(Value):
    """An immutable sequence of chunks; `append` and `append_int` return a new one."""

    _FIELDS = __slots__ = ("chunks",)
    chunks: list[ModelInputChunk]

    def __init__(self, chunks: Iterable[ModelInputChunk | dict[str, Any]]) -> None:
        checked = []
        for index, chunk in enumerate(chunks):
            try:
                checked.append(chunk_from_dict(chunk))
            except InvalidInputError as exc:
                raise nest(exc, f"chunks[{index}]") from exc
        set_field(self, "chunks", checked)

    @classmethod
    def wrap(cls, chunks: list[ModelInputChunk]) -> Self:
        """Take a list of chunks as it is."""
        return cls._make(chunks)

    @classmethod
    def from_ints(cls, tokens: Any) -> Self:
        """A single text chunk from a list, array or tensor of token ids."""
        return cls._make([EncodedTextChunk(tokens)])

    @classmethod
    def from_text(cls, text: str, tokenizer: Any, *, add_special_tokens: bool = True) -> Self:
        """Encode text with a tokenizer, as it stands: no chat template is applied.

        `tokenizer` is what `get_tokenizer()` returns, or anything with an `encode` method.
        """
        encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return cls.from_ints(getattr(encoded, "ids", encoded))

    @classmethod
    def empty(cls) -> Self:
        return cls([])

    def to_ints(self) -> list[int]:
        """All token ids as one list. Only for inputs made of text alone."""
        result: list[int] = self.to_numpy().tolist()
        return result

    def to_numpy(self) -> NDArray[np.int32]:
        """All token ids as one int32 array, read-only. Only for inputs made of text alone."""
        parts = []
        for index, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise InvalidInputError(
                    f"{type(chunk).__name__} has no token ids", path=f"chunks[{index}]"
                )
            parts.append(chunk.tokens_np)
        if len(parts) == 1:
            return parts[0]
        joined = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        joined.setflags(write=False)
        return joined

    def append(self, chunk: ModelInputChunk) -> Self:
        return type(self)([*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """Add one token, joining it to a trailing text chunk when there is one."""
        if self.chunks and isinstance(last := self.chunks[-1], EncodedTextChunk):
            return type(self)([*self.chunks[:-1], EncodedTextChunk([*last.tokens, token])])
        return self.append(EncodedTextChunk([token]))

    @property
    def length(self) -> int:
        """Positions this input takes in the context."""
        return sum(chunk.length for chunk in self.chunks)

    def _content(self) -> tuple[Any, ...]:
        return tuple(self.chunks)

    def __repr__(self) -> str:
        return f"ModelInput(chunks={self.chunks!r})"

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        chunks = value.get("chunks")
        if not isinstance(chunks, list):
            raise InvalidInputError("expected a list of chunks", path="chunks")
        if len(chunks) > MAX_CHUNKS:
            raise InvalidInputError(f"at most {MAX_CHUNKS}, got {len(chunks)}", path="chunks")
        return cls(chunks)

    @classmethod
    def _schema(cls) -> dict[str, Any]:
        chunks = {"type": "array", "items": CHUNK_SCHEMA, "maxItems": MAX_CHUNKS}
        return cls._object_schema({"chunks": chunks}, ["chunks"])

    def to_dict(self) -> dict[str, Any]:
        return {"chunks": [chunk.to_dict() for chunk in self.chunks]}

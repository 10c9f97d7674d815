"""The pieces a model input is made of: text, images, audio.

A chunk knows how many positions it takes in the model's context (`length`), and nothing about how
it travels or how a model embeds it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.cost import NOTHING
from tinkex.errors import InvalidInputError
from tinkex.types.data.arrays import check_flat, token_array
from tinkex.types.fields.given import remember_type
from tinkex.types.fields.value import Value, kept, set_field, short

MAX_TOKENS = 2**25
"""Most tokens of a chunk in JSON; what a model reads at once is far less."""
ImageFormat: TypeAlias = Literal["png", "jpeg"]


class EncodedTextChunk(Value):
    """Token ids. The sequence given is copied, so changing it later changes nothing here.

    `tokens` is a list made on first use; `tokens_np` is the int32 array behind it, read-only.
    """

    _FIELDS = ("tokens_np",)
    __slots__ = ("_as_given", "_tokens", "tokens_np")
    tokens_np: NDArray[np.int32]

    type: Literal["encoded_text"] = "encoded_text"

    def __init__(self, tokens: Any, type: str | None = None) -> None:
        set_field(self, "tokens_np", token_array(tokens))
        remember_type(self, type, self.type)

    @classmethod
    def wrap(cls, tokens_np: NDArray[np.int32]) -> Self:
        """Take an int32 array as it is, without a copy. The caller promises not to write to it."""
        chunk = cls.__new__(cls)
        set_field(chunk, "tokens_np", tokens_np)
        return chunk

    @kept
    def tokens(self) -> list[int]:
        listed: list[int] = self.tokens_np.tolist()
        return listed

    @property
    def length(self) -> int:
        return len(self.tokens_np)

    def __repr__(self) -> str:
        return f"EncodedTextChunk(tokens={self.tokens!r})"

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        tokens = _field(value, "tokens")
        chunk = cls(tokens, type=value.get("type"))
        if isinstance(tokens, list):
            check_flat(tokens, chunk.tokens_np, path="tokens")
        return chunk

    def to_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "type": self.type}


class _Image(Value):
    """The parts of both image chunks: format, the advisory size, and the 0.4.1 pixel fields."""

    __slots__ = ("_as_given", "expected_tokens", "format", "height", "tokens", "width")
    format: ImageFormat
    expected_tokens: int | None
    height: int | None
    width: int | None
    tokens: int | None

    type: str = ""
    _OWN: ClassVar[str]
    """The field that says which image: its bytes, or where they are."""

    def _fill_image(self, format: str, type: str | None, **counts: int | None) -> None:
        if format not in ("png", "jpeg"):
            raise InvalidInputError(f"expected 'png' or 'jpeg', got {format!r}", path="format")
        set_field(self, "format", format)
        remember_type(self, type, self.type)
        for name, count in counts.items():
            if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
                raise InvalidInputError(f"expected an integer, got {count!r}", path=name)
            if count is not None and not 0 <= count < 2**31:
                raise InvalidInputError(f"must be 0 or more, got {count}", path=name)
            set_field(self, name, count)

    @property
    def length(self) -> int:
        """Positions in the context, as the caller expects them."""
        count = self.tokens if self.expected_tokens is None else self.expected_tokens
        if count is None:
            raise InvalidInputError(
                f"the length of {type(self).__name__} is unknown here. Give expected_tokens.",
                path="expected_tokens",
            )
        return count

    def _counts(self) -> dict[str, int]:
        names = ("height", "tokens", "width", "expected_tokens")
        return {name: n for name in names if (n := getattr(self, name)) is not None}

    def _content(self) -> tuple[Any, ...]:
        return (getattr(self, self._OWN), self.format, *sorted(self._counts().items()))

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        needed = {name: _field(value, name) for name in (cls._OWN, "format")}
        others = ("expected_tokens", "type", "height", "width", "tokens")
        return cls(**needed, **{name: value.get(name) for name in others})


class ImageChunk(_Image):
    """An image given as bytes. `expected_tokens` is advisory: a server may refuse a mismatch.

    `height`, `width` and `tokens` belong to SDK 0.4.1; later servers want `expected_tokens`.
    """

    __slots__ = ("data",)
    data: bytes

    type: Literal["image"] = "image"
    _OWN = "data"

    def __init__(
        self,
        data: bytes | str,
        format: ImageFormat,
        expected_tokens: int | None = None,
        type: str | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        tokens: int | None = None,
    ) -> None:
        size = {"height": height, "width": width, "tokens": tokens}
        self._fill_image(format, type, expected_tokens=expected_tokens, **size)
        set_field(self, "data", _bytes(data, path="data"))

    def __repr__(self) -> str:
        return f"ImageChunk({len(self.data)} bytes, format={self.format!r}, {self._counts()})"

    def to_dict(self) -> dict[str, Any]:
        data = base64.b64encode(self.data).decode()
        return {"data": data, "format": self.format, **self._counts(), "type": self.type}


class ImageAssetPointerChunk(_Image):
    """An image the server fetches from `location`. For sampling only: training refuses it."""

    __slots__ = ("location",)
    location: str

    type: Literal["image_asset_pointer"] = "image_asset_pointer"
    _OWN = "location"

    def __init__(
        self,
        format: ImageFormat,
        location: str,
        expected_tokens: int | None = None,
        type: str | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        tokens: int | None = None,
    ) -> None:
        size = {"height": height, "width": width, "tokens": tokens}
        self._fill_image(format, type, expected_tokens=expected_tokens, **size)
        if not isinstance(location, str):
            raise InvalidInputError(f"expected text, got {short(location)}", path="location")
        set_field(self, "location", location)

    def __repr__(self) -> str:
        return f"ImageAssetPointerChunk({self.location!r}, {self.format!r}, {self._counts()})"

    def to_dict(self) -> dict[str, Any]:
        counts = self._counts()
        return {"format": self.format, "location": self.location, **counts, "type": self.type}


class DmelChunk(Value):
    """Audio as a serialised tensor of mel bins; its first dimension is the length."""

    _FIELDS = ("dmel",)
    __slots__ = ("_as_given", "dmel")
    dmel: bytes

    type: Literal["dmel"] = "dmel"

    def __init__(self, dmel: bytes | str, type: str | None = None) -> None:
        set_field(self, "dmel", _bytes(dmel, path="dmel"))
        remember_type(self, type, self.type)

    @property
    def length(self) -> int:
        return _container_shape(self.dmel)[0]

    def __repr__(self) -> str:
        return f"DmelChunk({len(self.dmel)} bytes)"

    @classmethod
    def _from_dict(cls, value: dict[str, Any]) -> Self:
        return cls(_field(value, "dmel"), type=value.get("type"))

    def to_dict(self) -> dict[str, Any]:
        return {"dmel": base64.b64encode(self.dmel).decode(), "type": self.type}


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk

_KINDS: dict[str, type[ModelInputChunk]] = {
    "encoded_text": EncodedTextChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "image": ImageChunk,
    "dmel": DmelChunk,
}
# SDK 0.4.1 leaves `type` out of what it sends, so the key only one kind has decides.
_KIND_BY_KEY = {
    "location": ImageAssetPointerChunk,
    "data": ImageChunk,
    "dmel": DmelChunk,
    "tokens": EncodedTextChunk,
}
_TOKENS = {
    "type": "array",
    "items": {"type": "integer"},
    "maxItems": MAX_TOKENS,
    "x-becomes": NOTHING,
}
CHUNK_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "encoded_text"}, "tokens": _TOKENS},
    "required": ["tokens"],
    "description": "Tokens. Images and audio have forms of their own, which text models refuse.",
}


def chunk_from_dict(value: Any) -> ModelInputChunk:
    """The chunk that a parsed JSON object stands for, with or without its `type`."""
    if isinstance(value, (EncodedTextChunk, _Image, DmelChunk)):
        return value  # type: ignore[return-value]
    if not isinstance(value, dict):
        raise InvalidInputError(f"expected a chunk, got {type(value).__name__}")
    name = value.get("type")
    kind: Any
    if name is None:
        kind = next((k for key, k in _KIND_BY_KEY.items() if key in value), None)
    else:
        kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidInputError(f"unknown chunk {name!r}; known: {', '.join(_KINDS)}", path="type")
    return kind._from_dict(value)  # type: ignore[no-any-return]


def _field(value: dict[str, Any], name: str) -> Any:
    if name not in value:
        raise InvalidInputError("field is missing", path=name)
    return value[name]


def _bytes(value: bytes | str, *, path: str) -> bytes:
    """Bytes as they are; text is standard base64, as in JSON."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, str):
        raise InvalidInputError(f"expected bytes, got {type(value).__name__}", path=path)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidInputError(f"is not base64: {exc}", path=path) from exc


def _container_shape(raw: bytes) -> list[int]:
    """The dimensions in a TensorContainer header (contract 7.1)."""
    at = 1 if raw[:1] == b"\xfe" else 0  # 254 marks a constant tensor
    if at >= len(raw) or raw[at] > 7:
        raise InvalidInputError("the tensor header has no known dtype", path="dmel")
    num_dims, at = _varint(raw, at + 1)
    if not 1 <= num_dims <= 16:
        raise InvalidInputError(f"the tensor header says {num_dims} dimensions", path="dmel")
    shape = []
    for _ in range(num_dims):
        size, at = _varint(raw, at)
        shape.append(size)
    return shape


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 63, 7):
        if at >= len(raw):
            break
        value |= (raw[at] & 0x7F) << shift
        at += 1
        if not raw[at - 1] & 0x80:
            return value, at
    raise InvalidInputError("the tensor header is cut short", path="dmel")

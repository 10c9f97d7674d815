"""Bodies of foreign APIs: read after the key, checked whole, nothing dropped in silence.

A field is honoured, refused with words, or named in the answer's `x-tinkex-ignored` header. The
last is only for fields that cannot change what is answered, such as a note of the caller's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tinkex.contract import sampling
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.exchange import read_json

IGNORED_HEADER = "x-tinkex-ignored"
MAX_TEXT = 16_000_000
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_STOPS = 64
MAX_ANSWERS = 128
MAX_NAMED = 32
"""Most fields of one list that the header names."""
_PLAIN = re.compile(r"[A-Za-z][\w-]{0,63}", re.ASCII)

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stops),
]


class ForeignBody(BaseModel):
    """A request body that knows which of its fields do nothing here, and which cannot be had."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields without influence on the answer."""

    def ignored(self) -> list[str]:
        """Names of the fields that were sent and do nothing here.

        Raises:
            InvalidInputError: A field is unknown.
        """
        extra = self.model_extra or {}
        for name in extra:
            if name not in self.harmless:
                raise InvalidInputError(
                    f"the field {name[:100]!r} is not known here; leave it out", path=name[:100]
                )
        return sorted({*(n for n, value in extra.items() if value is not None), *self.unheeded()})

    def unheeded(self) -> set[str]:
        """What was asked for inside a field and does nothing, such as `tools.strict`."""
        return set()


class SamplingFields(ForeignBody):
    """What every dialect has in common. None is what OpenAI's clients send for "not given"."""

    model: Name
    temperature: sampling.Temperature | None = None
    top_p: sampling.TopP | None = None
    top_k: sampling.TopK | None = None
    min_p: sampling.MinP | None = None
    seed: sampling.Seed | None = None
    logit_bias: sampling.LogitBias | None = None
    stream: bool | None = False

    def params(self, max_tokens: int | None) -> dict[str, Any]:
        """As `/asample` takes them."""
        names = [name for name in SamplingFields.model_fields if name not in ("model", "stream")]
        given = {"max_tokens": max_tokens, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in given.items() if value is not None}


B = TypeVar("B", bound=ForeignBody)


async def read(request: Request, kind: type[B]) -> B:
    """The body as `kind`.

    Raises:
        InvalidInputError: It is something else; `path` names the field.
    """
    body = await read_json(request)
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(f"{first['msg']}", path=path[:200]) from exc


def refuse(given: Any, path: str, why: str) -> None:
    """Refuse a field that would change the answer and cannot be had, unless it says nothing."""
    if given:
        raise NotSupportedError(why, path=path)


def extras_of(parts: Iterable[BaseModel], path: str) -> set[str]:
    """Fields that the parts of a list have and we do not know, as `path.NAME`."""
    return unknown_keys((part.model_extra or {} for part in parts), path)


def unknown_keys(parts: Iterable[Mapping[str, Any]], path: str, known: str = "") -> set[str]:
    """Keys of plain objects that say something and are not among the `known`, as `path.NAME`."""
    names = frozenset(known.split())
    found = {
        f"{path}.{name}"
        for part in parts
        for name, value in part.items()
        if value is not None and name not in names and _PLAIN.fullmatch(name)
    }
    return set(sorted(found)[:MAX_NAMED])


def header_of(ignored: Iterable[str]) -> dict[str, str]:
    names = ", ".join(sorted(set(ignored)))
    return {IGNORED_HEADER: names} if names else {}

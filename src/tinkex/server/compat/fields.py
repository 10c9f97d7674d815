"""Bodies of foreign APIs: read after the key, checked whole, nothing dropped in silence.

A field is honoured, refused with words, or named in the answer's `x-tinkex-ignored` header. The
last is only for fields that cannot change what is answered, such as a note of the caller's own.

A body of 400 bytes can unpack into a hundred thousand objects. So its lists, objects, keys and
values are counted before any of them is built (`Cost`); then it waits for room for what it
becomes, then for one of a few turns, fair between users; only then is it parsed and checked, on a
thread. A body of few parts, as most are, is read at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tinkex.contract import sampling
from tinkex.contract.bounds import Between
from tinkex.contract.cost import SAMPLE, Cost
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.http.bodies import parse_in_turn, read_body, reserve_parsed
from tinkex.server.process.off_loop import LARGE_BYTES, off_loop
from tinkex.types.fields.bounds import listing
from tinkex.wire import json_codec
from tinkex.wire.budget import (
    CHECKED,
    json_cost,
    parsed_json_bytes,
    quick_json_cost,
)

IGNORED_HEADER = "x-tinkex-ignored"
MAX_TEXT = 16_000_000
MAX_MESSAGES = 10_000
MAX_PARTS, MAX_ALL_PARTS = 4096, 20_000
"""Parts of a message's content: most in one, most in all."""
MAX_CALLS, MAX_ALL_CALLS = 1024, 10_000
"""Calls of tools: most in one message, most in all."""
MAX_TOOLS = 1024
MAX_STOPS = 64
MAX_ANSWERS = 128
MAX_OPTIONS, MAX_OPTION, MAX_OPTION_NAME = 64, 256, 100
"""Entries of a field of options, characters of one that is a text, and of its name."""
MAX_NAMED = 32
"""Most fields of one list that the header names."""
# Names of unknown fields are told in a header: none may bring a line break or a comma.
_PLAIN = re.compile(r"[A-Za-z][\w-]{0,63}", re.ASCII)

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Word = Annotated[str, Field(max_length=256)]
"""A name or an id that is passed on, or refused."""
NumTokens = Annotated[int, Between(1, 2**31 - 1, becomes="result_bytes")]
NumAnswers = Annotated[int, Between(1, MAX_ANSWERS, becomes="result_bytes")]
NumLikeliest = Annotated[int, Between(0, 20, becomes="result_bytes")]


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    *listing(MAX_STOPS),
    BeforeValidator(_stops),
]


def _plain_options(options: Any) -> Any:
    if not isinstance(options, dict):
        return options
    at_most(len(options), MAX_OPTIONS, "options", "")
    for name, value in options.items():
        if len(name) > MAX_OPTION_NAME:
            raise InvalidInputError(
                f"the name of an option has at most {MAX_OPTION_NAME} characters, {name[:40]!r}... "
                f"has {len(name)}"
            )
        if isinstance(value, list | dict) or len(str(value)) > MAX_OPTION:
            kind = type(value).__name__
            raise InvalidInputError(
                f"the option {name[:40]!r} must be a text of at most {MAX_OPTION} characters, a "
                f"number, true, false or null, got a {kind} of {len(str(value))} characters"
                if isinstance(value, str)
                else f"the option {name[:40]!r} must be a text, a number, true, false or null, "
                f"got a {kind}"
            )
    return options


Options = Annotated[dict[str, Any], BeforeValidator(_plain_options)]
"""Settings by name, each a plain value: a chat template may print them.

The first wrong one ends the check, which pydantic's own of a dictionary does not.
"""


CONVERSATION = replace(SAMPLE, containers=50_000, keys=150_000, values=250_000, depth=64)
"""Four thousand messages of an agent, in parts and with two thousand calls, have 20,000 objects."""
AT_ONCE = Cost(sent_bytes=LARGE_BYTES, containers=512, keys=2048, values=4096, depth=64)
"""Read on the event loop: a millisecond or two."""


class ForeignBody(BaseModel):
    """A request body that knows which of its fields do nothing here, and which cannot be had."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Fields without influence on the answer."""
    limit: ClassVar[Cost] = CONVERSATION
    """The most that a request may cost. JSON of any form in its fields is held to it, too."""
    fewer: ClassVar[str] = "fewer or shorter messages, calls or tools"
    """What to send less of when there is too much."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Fields that the answer needs; the others are let go once the prompt is made."""

    @model_validator(mode="before")
    @classmethod
    def _let_others_run(cls, value: Any) -> Any:
        """Validation holds the interpreter's lock from end to end; a call into Python lends it."""
        return value

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        """Refuse a parsed body with too many things of a kind, before they are looked at."""

    @classmethod
    def check_known(cls, body: Mapping[str, Any]) -> None:
        """Refuse a field that is neither read nor harmless.

        Raises:
            InvalidInputError: With the first one's name.
        """
        for name in body:
            if name not in cls.model_fields and name not in cls.harmless:
                raise InvalidInputError(
                    f"the field {name[:100]!r} is not known here; leave it out", path=name[:100]
                )

    def lean(self) -> Self:
        """The body with what the answer needs, and without what only the prompt was made of."""
        return self.model_construct(**{name: getattr(self, name) for name in self.kept})

    def ignored(self) -> list[str]:
        """Names of the fields that were sent and do nothing here."""
        extra = self.model_extra or {}
        return sorted({*(n for n, value in extra.items() if value is not None), *self.unheeded()})

    def unheeded(self) -> set[str]:
        """Names of settings inside fields that do nothing here, such as `tools.strict`."""
        return set()


class SamplingFields(ForeignBody):
    """Fields that every dialect has. None is what OpenAI's clients send for "not given"."""

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
        params = {"max_tokens": max_tokens, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in params.items() if value is not None}


B = TypeVar("B", bound=ForeignBody)


T = TypeVar("T")


async def read(request: Request, kind: type[B], then: Callable[[B], T]) -> T:
    """The body as `kind`, and what `then` makes of it, off the event loop unless it is small.

    Raises:
        InvalidInputError: It is something else, or too much; `path` names the field.
        ApiError: 429, when the server holds too many bodies.
    """
    raw = await read_body(request)
    is_small = len(raw) < LARGE_BYTES
    cost = quick_json_cost(raw) if is_small else None
    if cost is None or AT_ONCE.exceeded(cost):
        cost = await off_loop(len(raw), json_cost, raw)
    if exceeded := kind.limit.exceeded(cost):
        raise InvalidInputError(f"the body has {exceeded}; send {kind.fewer}")
    await reserve_parsed(request, parsed_json_bytes(raw, cost, CHECKED))
    if is_small and not AT_ONCE.exceeded(cost):
        return _judged(raw, kind, then)
    return await parse_in_turn(request, len(raw) + cost.values, _judged, raw, kind, then)


def _judged(raw: bytes, kind: type[B], then: Callable[[B], T]) -> T:
    body = json_codec.loads_object(raw or b"{}", is_counted=True)
    kind.check_known(body)
    kind.check_counts(body)
    try:
        request = kind.model_validate(body)
    except ValidationError as exc:
        raise _first_of(exc) from exc
    return then(request)


def _first_of(refused: ValidationError) -> InvalidInputError:
    """The first complaint.

    A function of its own: a validator's error knows the frame of whoever asked for the check. Kept
    in a variable there, it would hold itself and the whole body until the next garbage collection.
    """
    first = refused.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    why = first.get("ctx", {}).get("error", first["msg"])  # our own words, where they are ours
    return InvalidInputError(f"{why}", path=path[:200])


def at_most(count: int, most: int, what: str, path: str) -> None:
    """Refuse a list with more entries than may be.

    Raises:
        InvalidInputError: With the count and the limit.
    """
    if count > most:
        raise InvalidInputError(f"{count} {what}, the limit is {most}; send fewer", path=path)


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
    unknown = {
        f"{path}.{name}"
        for part in parts
        for name, value in part.items()
        if value is not None and name not in names and _PLAIN.fullmatch(name)
    }
    return set(sorted(unknown)[:MAX_NAMED])


def header_of(ignored: Iterable[str]) -> dict[str, str]:
    names = ", ".join(sorted(set(ignored)))
    return {IGNORED_HEADER: names} if names else {}

"""The two pydantic bases: what we send is checked for unknown fields, what we receive is not."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
)

from tinkex.errors import InvalidInputError
from tinkex.types.fields.complaints import explain
from tinkex.types.fields.value import set_field, short

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _InOurWords
else:

    class _InOurWords(type(BaseModel)):
        """`SamplingParams(...)` complains as everything here does; `model_validate` as before."""

        def __call__(cls, *args, **kwargs):
            if args:
                first = next(iter(cls.model_fields), "")
                raise TypeError(
                    f"{cls.__name__} takes its fields by name: "
                    f"{cls.__name__}({first}={short(args[0])})"
                )
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as exc:
                raise explain(exc, kwargs, cls.__name__, list(cls.model_fields)) from exc


RequestT = TypeVar("RequestT", bound="Request")


class _Message(BaseModel):
    def to_dict(self) -> dict[str, Any]:
        """The message as plain Python objects, ready for `json.dumps`."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        """The message that `to_dict` wrote; unknown keys of a response are left out.

        Raises:
            InvalidInputError: With the path of the first thing that is wrong.
        """
        if not isinstance(value, dict):
            raise InvalidInputError(f"expected an object, got {type(value).__name__}")
        try:
            return cls.model_validate(value)
        except ValidationError as exc:
            raise explain(exc, value, cls.__name__, list(cls.model_fields)) from exc


class Request(_Message, metaclass=_InOurWords):
    """Frozen; an unknown or non-finite field is an error at construction, not on the server."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @classmethod
    def unchecked(cls, **fields: object) -> Self:
        """A message of fields that were checked already, or are ours.

        Sets what pydantic's `model_construct` sets, in a fifth of its time: a client makes
        thousands of these at once.
        """
        return _filled(cls, {**_defaults(cls), **fields}, set(fields))

    def replaced(self, **fields: object) -> Self:
        """A copy with some fields changed, which are not checked either."""
        given = self.__pydantic_fields_set__ | fields.keys()
        return _filled(type(self), {**self.__dict__, **fields}, given)

    def refill(self, **fields: object) -> None:
        """Change fields of a message that nobody else has seen, which are not checked either."""
        self.__dict__.update(fields)
        self.__pydantic_fields_set__.update(fields)


def _filled(kind: type[RequestT], values: dict[str, object], given: set[str]) -> RequestT:
    message = kind.__new__(kind)
    set_field(message, "__dict__", values)
    set_field(message, "__pydantic_fields_set__", given)
    set_field(message, "__pydantic_extra__", None)
    set_field(message, "__pydantic_private__", None)
    return message


@cache
def _defaults(kind: type[BaseModel]) -> dict[str, object]:
    """Every field in its order; those without a default are to be given."""
    return {name: field.get_default() for name, field in kind.model_fields.items()}


class Response(_Message):
    """Frozen; fields of newer servers are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", protected_namespaces=(), ser_json_inf_nan="strings"
    )


T = TypeVar("T")


class FirstErrorOnly(FailFast):
    def __hash__(self) -> int:  # pydantic's own is not hashable, which unions need
        return hash(FirstErrorOnly)


Listing: TypeAlias = Annotated[list[T], FirstErrorOnly()]
"""A list whose first wrong element ends the check: a hostile body must not buy a million errors."""


def member_of(kind: type[Enum]) -> BeforeValidator:
    """Read a value as the enum itself would: its `_missing_` forgives other spellings.

    A function of its own, because pydantic reads the signature of what it is given, and that of
    an enum class takes no value since Python 3.12.
    """
    return BeforeValidator(lambda value: kind(value))


def all_known(kind: type[BaseModel]) -> BeforeValidator:
    """Refuse a field that `kind` does not have.

    Other messages leave out what newer peers send. These are settings, and a setting left out gives
    another result. Null says nothing, so it may have any name.
    """

    known = dict.fromkeys(kind.model_fields)

    def read(value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name, item in value.items():
            if name not in known and item is not None:
                raise InvalidInputError(
                    f"there is no such field; there are {', '.join(known)}",
                    path=str(name)[:80],
                )
        return value

    return BeforeValidator(read)


def all_texts(value: object) -> object:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, str):
                raise ValueError(f"{key!r} must be text, got {type(item).__name__}")
    return value


Texts: TypeAlias = Annotated[dict[str, str], BeforeValidator(all_texts)]
"""Text by name, with the same care as `Listing`."""


def _moment(value: object) -> object:
    """JSON has no form for a moment: it travels as text."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z") from exc


FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
"""No clock of a client or a server is honestly outside; databases and calendars end later."""
Moment: TypeAlias = Annotated[datetime, BeforeValidator(_moment)]
AwareMoment: TypeAlias = Annotated[
    AwareDatetime, Field(ge=FIRST, le=LAST), BeforeValidator(_moment)
]


def _number(value: object) -> object:
    """The three floats JSON has no form for, from their names."""
    return _NAMED_FLOATS.get(value, value) if isinstance(value, str) else value


_NAMED_FLOATS = {name: float(name) for name in ("NaN", "Infinity", "-Infinity")}

Metrics: TypeAlias = dict[str, Annotated[float, BeforeValidator(_number)]]
"""Numbers by name. NaN has no JSON form, so it travels as the text "NaN"."""

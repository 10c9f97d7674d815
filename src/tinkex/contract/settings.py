"""Settings by name: their type, range and default, and the one reader that refuses by them.

A setting is declared alone, as those of a loss are, or as an annotated field of a frozen dataclass,
as those of an optimizer and of a sample are:

    beta1: Annotated[float, Between(0, below=1), "Decay of the first moment."] = 0.9

`read` takes what a caller gave, by name, and returns complete values; `check` looks at values that
are already complete. Both raise the same errors, so client, server and engine answer alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tinkex.contract.bounds import Between
from tinkex.errors import InvalidInputError

T = TypeVar("T")
REQUIRED: Final = MISSING
"""The default of a setting that must be given."""


class Kind(Protocol):
    """A rule for values that are not plain numbers."""

    def read(self, value: Any) -> Any:
        """The value in its own type.

        Raises:
            ValueError: Says what the value must be.
        """
        ...

    def schema(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A declared setting. A default of None means that None may be given, too.

    Told apart by identity: they are keys of what is remembered, at every sample.
    """

    name: str
    default: Any = REQUIRED
    rule: Between | Kind = Between()
    says: str = ""
    type: type = float

    def read(self, value: Any) -> Any:
        """The value in its own type.

        Raises:
            ValueError: Says what the value must be, and what it was.
        """
        if value is None and self.default is None:
            return None
        if not isinstance(self.rule, Between):
            return self.rule.read(value)
        if self.type is bool:
            if not isinstance(value, bool):
                raise ValueError(f"must be true or false, got {shown(value)}")
            return value
        if not _is_of(self.type, value):
            what = "whole" if self.type is int else "finite"
            limits = f", {self.rule}" if str(self.rule) else ""
            raise ValueError(f"must be a {what} number{limits}, got {shown(value)}")
        if not self.rule.holds(value):
            raise ValueError(f"must be {self.rule}, got {shown(value)}")
        return self.type(value)

    def schema(self) -> dict[str, Any]:
        """The setting as a JSON schema."""
        if isinstance(self.rule, Between):
            kind = {int: "integer", bool: "boolean"}.get(self.type, "number")
            schema: dict[str, Any] = {"type": kind, **self.rule.schema()}
        else:
            schema = self.rule.schema()
        if self.says:
            schema["description"] = self.says
        if self.default is None:
            return {"anyOf": [schema, {"type": "null"}]}
        return schema if self.default is REQUIRED else {**schema, "default": self.default}


def _is_of(kind: type, value: Any) -> bool:
    """Whether it is a number of that kind; true and false are none, nor are NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) if kind is int else is_finite(value)


def is_finite(number: float) -> bool:
    """Whether it is a float, or a whole number that has one."""
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        return False


def shown(value: Any) -> str:
    """A value as an error shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"a value of type {type(value).__name__} that is too long to be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_all(
    settings: Sequence[Setting],
    given: Mapping[str, Any],
    *,
    of: str,
    path: str = "",
) -> dict[str, Any]:
    """All settings by name, defaults filled in.

    `of` is what they are settings of, for the message.

    Raises:
        InvalidInputError: Names the setting, its value and what is allowed.
    """
    known = {setting.name: setting for setting in settings}
    for name in given:
        if name not in known:
            raise InvalidInputError(
                f"{of} has no such setting; it has: {', '.join(known) or 'none'}",
                path=_join(path, str(name)[:80]),
            )
    values = {}
    for setting in settings:
        name, default = setting.name, setting.default
        value = given.get(name, default)
        if type(value) is not type(default) or value != default:
            value = _read_one(setting, value, path)
        elif default is REQUIRED:
            raise InvalidInputError("is required", path=_join(path, name))
        values[name] = value
    _check_pairs(settings, values, path)
    return values


def _read_one(setting: Setting, value: Any, path: str) -> Any:
    try:
        return setting.read(value)
    except ValueError as exc:
        raise InvalidInputError(str(exc), path=_join(path, setting.name)) from exc


@cache
def _pairs(settings: tuple[Setting, ...]) -> tuple[tuple[Setting, dict[str, str]], ...]:
    """The settings among them that have a limit which is another setting."""
    rules = [(setting, setting.rule) for setting in settings]
    pairs = [(setting, rule.names) for setting, rule in rules if isinstance(rule, Between)]
    return tuple((setting, names) for setting, names in pairs if names)


def _check_pairs(settings: Sequence[Setting], values: Mapping[str, Any], path: str) -> None:
    """Limits that are other settings, once all are known."""
    for setting, names in _pairs(tuple(settings)):
        for word, other in names.items():
            if not Between(**{word: values[other]}).holds(values[setting.name]):
                raise InvalidInputError(
                    f"{setting.name} {values[setting.name]} must be "
                    f"{word.replace('_', ' ')} {other}, which is {values[other]}",
                    path=path,
                )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ------------------------------------------------------------------------------ of dataclasses


def _settings_of(declaration: Any) -> tuple[Setting, ...]:
    hints = get_type_hints(declaration, include_extras=True)
    settings = []
    for field in fields(declaration):
        hint = _without_none(hints[field.name])
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (object,)
        rules = [extra for extra in extras if not isinstance(extra, str)]
        if rules:
            says = " ".join(extra for extra in extras if isinstance(extra, str))
            settings.append(Setting(field.name, field.default, rules[0], says, kind))
    return tuple(settings)


def _without_none(hint: Any) -> Any:
    """`Annotated[int, ...]` of `Annotated[int, ...] | None`."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    parts = [part for part in get_args(hint) if part is not NoneType]
    return parts[0] if len(parts) == 1 else hint


settings_of: Callable[[type], tuple[Setting, ...]] = cache(_settings_of)
"""The annotated fields of a dataclass as settings; fields without a rule are left out."""


def read(
    declaration: type[T], given: Mapping[str, Any], *, of: str, path: str = "", **fixed: Any
) -> T:
    """An instance of a declared dataclass from what was given.

    Raises:
        InvalidInputError: Names the setting, its value and what is allowed.
    """
    return declaration(**read_all(settings_of(declaration), given, of=of, path=path), **fixed)


def check(values: Any, *, path: str = "") -> None:
    """Refuse an instance of a declared dataclass whose values are out of range.

    Raises:
        InvalidInputError: Names the setting, its value and what is allowed.
    """
    settings = settings_of(type(values))
    for setting in settings:
        value, default = getattr(values, setting.name), setting.default
        if value is not default and (type(value) is not type(default) or value != default):
            _read_one(setting, value, path)
    if _pairs(settings):
        _check_pairs(settings, {s.name: getattr(values, s.name) for s in settings}, path)

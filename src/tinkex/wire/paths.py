"""Turn every way of failing to decode into one error with one spelling of the path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinkex.errors import InvalidInputError, WireError

if TYPE_CHECKING:
    from pydantic import ValidationError


def join(prefix: str, path: str) -> str:
    """`data[3]` and `weights` make `data[3].weights`; `data` and `[3]` make `data[3]`."""
    if not prefix or not path:
        return prefix or path
    return f"{prefix}{path}" if path.startswith("[") else f"{prefix}.{path}"


def spell(location: tuple[Any, ...]) -> str:
    """A pydantic location as a path."""
    text = ""
    for part in location:
        text = join(text, f"[{part}]" if isinstance(part, int) else str(part))
    return text


@contextmanager
def at(prefix: str) -> Iterator[None]:
    """Errors raised inside become `WireError` with `prefix` in front of their path."""
    try:
        yield
    except InvalidInputError as exc:
        raise wire_error(exc, prefix) from exc


def wire_error(error: InvalidInputError, prefix: str = "") -> WireError:
    """The same complaint as a `WireError`, its path starting at `prefix`."""
    text = str(error).removeprefix(f"{error.path}: ") if error.path else str(error)
    return WireError(text, path=join(prefix, error.path))


def from_validation(error: ValidationError) -> WireError:
    """The first complaint of pydantic, with our own inner path where there is one."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = spell(first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return wire_error(cause, path)
    more = error.error_count() - 1
    text = str(cause) if cause is not None else _lower_first(first["msg"])
    return WireError(text + (f" (and {more} more)" if more else ""), path=path)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]

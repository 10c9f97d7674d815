"""Every error a user of Tinkex can meet, in one tree.

Each class also derives from the builtin a caller would reach for (`ValueError` for a wrong value,
`ConnectionError` for a lost peer), and every instance survives pickling with its attributes, because
errors cross process borders here. This module imports nothing but the standard library: `engine`
runs on machines that have neither pydantic nor httpx.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[TinkerError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkerError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class TinkerError(Exception):
    """The root of the tree. `code` is a short stable name for programs; the text is for people."""

    code = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class InvalidInputError(TinkerError, ValueError):
    """A value the caller gave is wrong. `path` names the field, such as `data[3].weights`."""

    code = "invalid_input"

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class WireError(InvalidInputError):
    """Bytes that arrived do not decode into the value that was expected."""

    code = "invalid_wire"


class ConfigError(TinkerError, ValueError):
    """A setting is unknown, missing or out of range."""

    code = "invalid_config"


class NotSupportedError(InvalidInputError):
    """A request that is well formed but asks for something this server or model does not do."""

    code = "not_supported"


class ModelNotFoundError(TinkerError, LookupError):
    """No base model, adapter or checkpoint of that name is known here."""

    code = "not_found"


class EngineError(TinkerError, RuntimeError):
    """Compute failed through no fault of the caller."""

    code = "engine_failed"


class WorkerLostError(EngineError):
    """A worker process died; what it held in memory must be restored."""

    code = "worker_lost"

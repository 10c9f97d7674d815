"""Futures that can be used as their result, for programs written for SDKs up to 0.37.

Up to SDK 0.37 some calls (`create_lora_training_client`, `get_info` ...) waited and gave the plain
value; from 0.38 on every call gives a future. Programs of both ages run here, so `await f()`,
`f().result()` and `f()` used as its result all work: `DirectFuture` passes whatever a future does
not have on to its result, and `isinstance` sees both. No other module disguises an object.

A client that opens lazily and can be awaited would not do: some of these results are plain messages
and tokenizers of other libraries, a program may ask `isinstance` for either kind, and an error has
to be raised where the call is made. Code of our own awaits such a call or takes its `result()`.

Outside an event loop such a call waits before it returns, so that an error is raised at the line
that caused it, where programs catch it. Inside one it returns at once and is awaited; so it does
where `.result(...)` stands right behind it, or is asked of the variable that it is given to: there
the caller says how long to wait.
"""

from __future__ import annotations

import concurrent.futures
import dis
import functools
import logging
import sys
from collections.abc import Generator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tinkex.client.deprecations import warn_once
from tinkex.client.futures import NO_STEPS, APIFuture, is_in_loop, next_step

logger = logging.getLogger("tinkex.futures")
T = TypeVar("T")
# Calls whose result is a training or a sampling client, which SDK 0.38 wants asked for.
_MAKE_CLIENTS = (
    "create_lora_training_client",
    "create_training_client",
    "create_sampling_client",
    "save_weights_and_get_sampling_client",
)


class DirectFuture(APIFuture[T]):
    """A future that can also be used as its result, which it then waits for."""

    def __init__(self, behind: APIFuture[T], name: str, kind: type[T] | None = None) -> None:
        super().__init__()
        self._behind = behind
        self._name = name
        self._kind = kind
        self._got: T | None = None
        self._ender = behind._ender
        self.follow(behind)
        self._is_set_up = True  # from here on, foreign attributes are those of the result
        behind.add_done_callback(self._end_like)

    @classmethod
    def of(cls, behind: APIFuture[T], name: str, kind: type[T] | None = None) -> Self:
        """The answer of the method `name`, called by that. Waits outside an event loop."""
        future = cls(behind, name, kind)
        if not is_in_loop() and not _is_asked_at_once(_caller()):
            future.result()
        return future

    def _end_like(self, behind: concurrent.futures.Future[T]) -> None:
        if behind.cancelled():
            self.cancel()
        elif (error := behind.exception()) is not None:
            self._fail(error)
        else:
            self._succeed(behind.result())

    def _cancel_task(self) -> None:
        self._behind.cancel()

    # -- as the result

    def _value(self) -> T:
        if self._got is not None:
            return self._got
        if self._name.startswith(_MAKE_CLIENTS):
            what = f"Using what {self._name}() gives as the client itself"
            warn_once(what, "take its .result(), or await it")
        if not self.done() and is_in_loop():
            logger.warning(
                "What %s() gives is used before it is there, which blocks the running event loop; "
                "await %s() instead.",
                self._name,
                self._name,
            )
        self._got = self.result()
        return self._got

    def __getattr__(self, name: str) -> Any:
        # Only asked for what a future does not have. Dunder names are asked for by libraries that
        # look at what an object is; none of them may wait for a server.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value(), name)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if "_is_set_up" not in self.__dict__ or name in self.__dict__:
                object.__setattr__(self, name, value)
            else:
                setattr(self._value(), name, value)

        @property
        def __class__(self) -> type:
            """The type of the result, which `isinstance` sees beside APIFuture.

            One that only the result tells is known when that is there: asyncio itself asks, and
            an `await` must not wait in the loop.
            """
            if self._kind is None and not self.done():
                return DirectFuture
            return self._kind or type(self._value())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value()(*args, **kwargs)  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self._value())  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        # Without this method Python would ask `__len__`, and `if client:` would wait for a server.
        return True

    def __repr__(self) -> str:
        if self.done() and not self.cancelled() and self.exception() is None:
            return repr(self.result())
        return f"<{self._name}(): {self.status()}>"

    __str__ = __repr__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value().__reduce_ex__(protocol)


_CLIENT = "tinkex.client."
_OF_ANOTHER = ("LOAD_METHOD", "LOAD_ATTR")
"""Instructions that load what another value has."""
_QUESTIONS = frozenset(
    "result result_async future coroutine exception status done cancel add_done_callback".split()
)


def _caller() -> FrameType:
    """The code outside the SDK that made the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_CLIENT):
        frame = frame.f_back
    return frame


def _is_asked_at_once(caller: FrameType) -> bool:
    """Whether the next thing that the caller does is to ask the answer as one asks a future.

    Only the code that called can tell `f().result(timeout=1)` from `f()`: the one wants its own
    limit, the other the error at this line.
    """
    step = next_step(caller)
    if step is None:
        return False
    if step.opname.startswith("STORE_"):
        # One instruction of Python 3.13 may store a variable and load another.
        is_pair = isinstance(step.argval, tuple)
        return (step.argval[0] if is_pair else step.argval) in _asked_names(caller.f_code)
    return _is_question(step)


def _is_question(step: dis.Instruction) -> bool:
    return step.opname in _OF_ANOTHER and step.argval in _QUESTIONS


# Reading a long function takes milliseconds.
@functools.lru_cache(maxsize=256)
def _asked_names(code: CodeType) -> frozenset[str]:
    """The variables that the code asks as one asks a future: `x.result(...)`."""
    names, loaded = set(), None
    for step in dis.get_instructions(code):
        if step.opname in NO_STEPS:
            continue
        if loaded is not None and _is_question(step):
            names.add(loaded)
        # Of a constant the value is told, which may be a tuple too, and an empty one.
        is_load = "LOAD_" in step.opname and "CONST" not in step.opname
        loaded = step.argval if is_load and step.opname not in _OF_ANOTHER else None
        if isinstance(loaded, tuple):
            loaded = loaded[-1]
    return frozenset(name for name in names if isinstance(name, str))


class BaseModelName(str):
    """A text with the ways of asking that a future has. It is there already."""

    def result(self, timeout: float | None = None) -> str:
        return str(self)

    async def result_async(self, timeout: float | None = None) -> str:
        return str(self)

    coroutine = result_async

    def future(self) -> APIFuture[str]:
        done: APIFuture[str] = APIFuture()
        done.set_result(str(self))
        return done

    def __await__(self) -> Generator[Any, None, str]:
        return self.result_async().__await__()

"""The `_async` twin of every method, made from the method: `awaited`, `submitted` or `threaded`.

A twin looks its method up by name at each call, because a subclass may override it. Since SDK 0.38
the method itself is awaited; the first two kinds of twins say so once and go on working. A twin
gives an `AsyncCall`: a coroutine that says what is missing when it is used as its result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinkex.client.deprecations import warn_once
from tinkex.client.futures import APIFuture

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class AsyncCall(Coroutine[Any, Any, T]):
    """The coroutine of an `_async` call. Await it, or give it to whatever takes a coroutine."""

    __slots__ = ("_coroutine", "_name")

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        self._coroutine = coroutine
        self._name = name
        # What Python calls it when it was never awaited.
        coroutine.__name__ = coroutine.__qualname__ = name  # type: ignore[attr-defined]

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        text = f"'AsyncCall' object has no attribute {name!r}"
        if not name.startswith(("_", "cr_", "gi_")):  # which asyncio asks of every coroutine
            text = f"{self._name}(...) was not awaited: write `await {self._name}(...)` first"
        raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<{self._name}(...), not awaited>"


def awaited(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The `_async` twin that gives the value."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        future: APIFuture[T] = getattr(self, method.__name__)(*args, **kwargs)
        return await future

    twin = _twin(run, method, "Like `{}`, and gives the value once it is there.", is_old=True)
    # What `help()` shows: the value, not the future that the method itself gives.
    if isinstance(annotation := method.__annotations__.get("return"), str):
        value = (
            annotation.partition("[")[2][:-1]
            if "[" in annotation
            else annotation.removesuffix("Future")
        )
        signature = inspect.signature(method).replace(return_annotation=value)
        twin.__annotations__ = {**method.__annotations__, "return": value}
        twin.__signature__ = signature  # type: ignore[attr-defined]
    return twin


def submitted(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, APIFuture[T]]]:
    """The `_async` twin that gives the future: awaited twice, as up to SDK 0.37."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        future: APIFuture[T] = getattr(self, method.__name__)(*args, **kwargs)
        return future

    doc = "Submit like `{}`; await the returned future for the result."
    return _twin(run, method, doc, is_old=True)


def threaded(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The `_async` twin of a call that waits before it returns: it does so in another thread."""

    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(getattr(self, method.__name__), *args, **kwargs)

    return _twin(run, method, "Like `{}`, without blocking the event loop.")


def _twin(
    run: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    method: Callable[..., Any],
    doc: str,
    *,
    is_old: bool = False,
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    name = f"{method.__name__}_async"

    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        # Here, at the line that calls: a task steps the coroutine from somewhere in asyncio.
        if is_old:
            warn_once(f"{name}()", f"await {method.__name__}() instead")
        return AsyncCall(run(self, *args, **kwargs), name)

    functools.update_wrapper(twin, method)
    twin.__name__, twin.__doc__ = name, doc.format(method.__name__)
    twin.__qualname__ += "_async"
    # For what asks `iscoroutinefunction`: Python 3.12 has a call for it, 3.11 a mark of asyncio's.
    if (mark := getattr(inspect, "markcoroutinefunction", None)) is not None:
        mark(twin)
    else:
        twin.__dict__["_is_coroutine"] = vars(asyncio.coroutines)["_is_coroutine"]
    return twin

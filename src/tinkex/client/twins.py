"""The `_async` twin of every method, made from the method: `awaited`, `submitted` or `threaded`.

A twin looks its method up by name at each call, because a subclass may override it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinkex.client.futures import APIFuture

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])


def awaited(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The `_async` twin that gives the value."""

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        future: APIFuture[T] = getattr(self, method.__name__)(*args, **kwargs)
        return await future

    return _named(twin, method, "Like `{}`, and gives the value once it is there.")


def submitted(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, APIFuture[T]]]:
    """The `_async` twin that gives the future: awaited twice, as up to SDK 0.37."""

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        future: APIFuture[T] = getattr(self, method.__name__)(*args, **kwargs)
        return future

    return _named(twin, method, "Submit like `{}`; await the returned future for the result.")


def threaded(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The `_async` twin of a call that waits before it returns: it does so in another thread."""

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(getattr(self, method.__name__), *args, **kwargs)

    return _named(twin, method, "Like `{}`, without blocking the event loop.")


def _named(twin: C, method: Callable[..., Any], doc: str) -> C:
    functools.update_wrapper(twin, method)
    twin.__name__, twin.__doc__ = f"{method.__name__}_async", doc.format(method.__name__)
    twin.__qualname__ += "_async"
    return twin

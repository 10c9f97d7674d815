"""A future can be awaited, waited for, gathered, cancelled and asked, from anywhere (R17)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
import warnings
from typing import Any

import pytest
from patience import until

from tinkex.client import futures
from tinkex.client.background_loop import LoopThread
from tinkex.client.futures import APIFuture, Waiting, spawn
from tinkex.client.older_sdk import _asked_names
from tinkex.errors import ClientClosedError, ResultTimeoutError, TinkerError


async def _value(value: int, delay_s: float = 0.01) -> int:
    await asyncio.sleep(delay_s)
    return value


async def _once(event: threading.Event, value: int) -> int:
    """The value, when somebody says so."""
    assert await asyncio.to_thread(event.wait, 60)
    return value


def make(value: int, delay_s: float = 0.01) -> APIFuture[int]:
    return spawn(lambda waiting: _value(value, delay_s))


def test_a_result_is_waited_for_and_then_kept() -> None:
    future = make(7)
    assert future.result(60) == 7
    assert future.result(0) == 7
    assert future.status().state == "done"


def test_who_forgets_to_wait_is_told_so() -> None:
    future = make(7)
    with pytest.raises(AttributeError, match=r"no attribute 'metrics'.* Call .result\(\)"):
        future.metrics  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(future, "__array__")
    assert future.result(5) == 7


async def test_it_can_be_awaited_more_than_once_and_gathered() -> None:
    future = make(7)
    assert await future == 7
    assert await future == 7
    assert await asyncio.gather(make(1), make(2), future) == [1, 2, 7]
    assert await asyncio.wrap_future(make(3)) == 3
    assert await asyncio.create_task(make(4).result_async()) == 4


def test_it_can_be_awaited_from_several_loops_at_once() -> None:
    future = make(5, 0.1)
    results: list[int] = []

    async def wait() -> int:
        return await future

    threads = [threading.Thread(target=lambda: results.append(asyncio.run(wait()))) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [5, 5, 5]


def test_it_works_with_the_standard_library_of_futures() -> None:
    futures = [make(n, 0.01 * n) for n in range(5)]
    done = list(concurrent.futures.as_completed(futures, timeout=60))
    assert sorted(future.result() for future in done) == list(range(5))


def test_a_timeout_says_what_the_request_is_doing_and_leaves_it_alone() -> None:
    may_end = threading.Event()

    def start(waiting: Waiting):  # type: ignore[no-untyped-def]
        waiting.state, waiting.reason, waiting.request_id = "queued", "3 requests ahead", "r9"
        return _once(may_end, 1)

    future = spawn(start)
    with pytest.raises(ResultTimeoutError, match="queued: 3 requests ahead"):
        future.result(0.05)
    status = future.status()
    assert (status.state, status.reason, status.request_id) == ("queued", "3 requests ahead", "r9")
    may_end.set()
    assert future.result(60) == 1
    assert isinstance(ResultTimeoutError("x"), TimeoutError)


async def test_an_async_timeout_cancels_the_request() -> None:
    future = make(1, 600)
    with pytest.raises(ResultTimeoutError):
        await future.result_async(0.05)
    assert future.cancelled()


def test_cancelling_stops_the_work_once() -> None:
    started, stopped = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    future = spawn(lambda waiting: work())
    assert started.wait(60)
    assert future.cancel() is True
    assert future.cancel() is False
    assert stopped.wait(60)
    assert future.status().state == "cancelled"
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(60)


async def test_cancelling_the_waiter_cancels_the_request() -> None:
    future = make(1, 60)
    waiter = asyncio.create_task(future.result_async())
    await asyncio.sleep(0.05)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert future.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await future


def test_a_crash_in_the_machinery_reaches_the_caller() -> None:
    async def crash() -> None:
        raise ZeroDivisionError("in the machinery")

    future = spawn(lambda waiting: crash())
    with pytest.raises(ZeroDivisionError, match="in the machinery"):
        future.result(60)
    assert future.status().state == "failed"
    assert isinstance(future.exception(0), ZeroDivisionError)


async def test_a_result_that_is_itself_a_timeout_error_is_not_mistaken_for_ours() -> None:
    async def fail() -> None:
        raise TimeoutError("the server's")

    with pytest.raises(TimeoutError, match="the server's"):
        spawn(lambda waiting: fail()).result(60)


def test_blocking_in_a_callback_is_refused_instead_of_hanging() -> None:
    caught: list[BaseException] = []
    may_end = threading.Event()
    slow = spawn(lambda waiting: _once(may_end, 1))

    def callback(_: object) -> None:
        try:
            slow.result()
        except BaseException as exc:
            caught.append(exc)

    may_begin = threading.Event()
    first = spawn(lambda waiting: _once(may_begin, 0))
    first.add_done_callback(callback)
    may_begin.set()
    first.result(60)
    until(lambda: caught)
    may_end.set()
    assert slow.result(60) == 1
    assert isinstance(caught[0], TinkerError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_loop_and_cannot_wait_for_the_parents_futures() -> None:
    pending = make(1, 2)
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        try:
            try:
                pending.result(60)
                os._exit(1)
            except TinkerError:
                pass
            os._exit(0 if make(5).result(60) == 5 else 2)
        except BaseException:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pending.result(60) == 1


def test_calls_from_many_threads_keep_their_own_order() -> None:
    from tinkex.client.background_loop import background

    seen: list[tuple[int, int]] = []

    def submit(thread: int) -> None:
        for number in range(200):
            background().submit(seen.append, (thread, number))

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    make(0).result(60)
    for n in range(4):
        assert [number for thread, number in seen if thread == n] == list(range(200))


def test_a_loop_of_results_in_a_coroutine_reads_its_code_once() -> None:
    """Reading a long function takes milliseconds, which thousands of samples would wait for."""
    future: APIFuture[int] = APIFuture()
    future.set_result(1)

    async def one_by_one() -> None:
        for _ in range(100):
            future.result()

    before = futures._step_after.cache_info().misses
    asyncio.run(one_by_one())
    assert futures._step_after.cache_info().misses == before + 1


def test_code_with_empty_tuples_is_read_like_any_other() -> None:
    """Every call that makes a client reads its caller's; a constant `()` ended it in an error."""

    def program(make: Any) -> Any:
        client, nothing = make(), ()
        other = make(())
        return client.result(), other, nothing

    assert _asked_names(program.__code__) == {"client"}


def test_a_call_at_the_end_of_the_program_is_refused_and_leaves_no_coroutine_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = LoopThread()
    ended.end()
    monkeypatch.setattr(futures, "background", lambda: ended)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ClientClosedError, match="The program is ending"):
            make(1)
        gc.collect()
    assert [str(each.message) for each in caught] == []

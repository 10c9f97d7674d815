"""What holds the event loop is found, with the line that did it, and noise is not taken for it."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest
from app_world import open_app
from server_process import ServerProcess
from wire_client import WireClient

from tinkex.server.process.loop_guard import Hold, LoopGuard, _frames


def _busy(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


async def _held(work: object, **options: object) -> list[Hold]:
    with LoopGuard(on_hold=lambda hold: None, **options) as guard:  # type: ignore[arg-type]
        await asyncio.sleep(0)
        work()  # type: ignore[operator]
        await asyncio.sleep(0)
    assert asyncio.Handle._run.__name__ == "_run", "nothing of it stays"
    return guard.holds


async def test_a_callback_that_computes_is_found_with_its_line() -> None:
    (hold,) = await _held(lambda: _busy(0.6))
    assert hold.seconds > 0.2
    assert "_busy" in hold.stack
    assert "held the event loop for 0." in str(hold)


async def test_a_call_that_keeps_pythons_lock_is_found_too() -> None:
    """No other thread runs meanwhile, the guard's included."""
    text, pattern = "a" * 24, re.compile(r"(a|a)*b")
    (hold,) = await _held(lambda: pattern.match(text))
    assert "pattern.match" in hold.stack


async def test_waiting_collecting_and_many_short_ones_are_innocent() -> None:
    def work() -> None:
        time.sleep(0.3)  # as a machine that is busy with others does it
        rings = [[] for _ in range(300_000)]  # type: ignore[var-annotated]
        for ring in rings:
            ring.append(ring)
        del rings
        gc.collect()

    assert [hold for hold in await _held(work) if "gc.collect" in hold.stack] == []
    with LoopGuard(on_hold=lambda hold: None) as guard:
        for _ in range(10):
            _busy(0.04)
            await asyncio.sleep(0)
    assert guard.holds == []


async def test_time_of_others_is_not_charged() -> None:
    def is_ours(stack: Sequence[FrameType]) -> bool:
        return any(frame.f_code.co_name == "mine" for frame in stack)

    def mine() -> None:
        _busy(0.6)

    assert await _held(lambda: _busy(0.6), is_ours=is_ours) == []
    assert len(await _held(mine, is_ours=is_ours)) == 1


def test_a_look_sees_frames_of_one_moment() -> None:
    """A generator that went on while its callers were asked for had none, or a dict for one."""
    ends = threading.Event()

    def numbers(depth: int) -> Iterator[int]:
        yield from numbers(depth - 1) if depth else range(3)

    def work() -> None:
        while not ends.is_set():
            sum(numbers(20))

    thread = threading.Thread(target=work)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(3000):
            stack = _frames(thread.ident or 0)
            assert not stack or stack[-1].f_code.co_name == "_bootstrap", stack
    finally:
        sys.setswitchinterval(interval_s)
        ends.set()
        thread.join()
    assert _frames(0) == []


async def test_a_server_in_a_test_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinkex.server.work import sampling_sessions

    plain = sampling_sessions.SamplingSessions.get

    async def slow(self: object, *args: object) -> object:
        _busy(0.6)
        return await plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling_sessions.SamplingSessions, "get", slow)
    opened = open_app(tmp_path)
    world = await opened.__aenter__()
    await world.post("retrieve_futures", {"target": {"sampling_session_id": "x"}, "prev_cursor": 0})
    with pytest.raises(AssertionError, match=r"held the event loop for 0\.\d+ s(.|\n)*_busy"):
        await opened.__aexit__(None, None, None)


def test_a_server_with_debug_logs_the_stack(tmp_path: Path) -> None:
    program = tmp_path / "slow.py"
    program.write_text(
        "import time\n"
        "from tinkex.server.guard.auth import Auth\n"
        "plain = Auth.identity_of\n"
        "def identity_of(*args, **more):\n"
        "    ends = time.thread_time() + 0.6\n"
        "    while time.thread_time() < ends: pass\n"
        "    return plain(*args, **more)\n"
        "Auth.identity_of = identity_of\n"
        "from tinkex.server.serve import serve\n"
        "serve()\n"
    )
    flags = ("--engine", "toy", "--debug")
    command = (str(program),)
    with ServerProcess(tmp_path / "server", *flags, program=command, guarded=False) as server:
        client = WireClient(server.base_url)
        client.session()
        client.close()
    assert "held the event loop for 0." in server.log
    assert "in identity_of" in server.log

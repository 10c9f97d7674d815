"""What became of requests reaches the journal a moment later, together and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

from tinkex.server.process.disk import DiskFullError
from tinkex.server.work.write_behind import Note, WriteBehind
from tinkex.store import Ended
from tinkex.store.journal import Journal


class Notebook:
    """A journal whose writes end when the test says so."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self._futures: list[Future[list[BaseException | None]]] = []

    def note(self, notes: Sequence[Note]) -> Future[list[BaseException | None]]:
        self.written.append([note.request_id for note in notes])
        self._futures.append(Future())
        return self._futures[-1]

    async def end(self, *errors: BaseException | None) -> None:
        self._futures.pop(0).set_result(list(errors))
        await asyncio.sleep(0)


def behind(**how: Any) -> tuple[Notebook, WriteBehind]:
    notebook = Notebook()
    return notebook, WriteBehind(cast(Journal, notebook), **how)


def end(name: str) -> Ended:
    return Ended(request_id=name, result=b"r", finished_at=1.0)


async def test_what_is_gathered_is_one_write_and_told_once_it_is_durable() -> None:
    notebook, ends = behind(delay_s=3600.0)
    told: list[str] = []
    ends.on_written = lambda notes: told.extend(note.request_id for note in notes)
    ends.put(end("a"))
    ends.put(end("b"), lambda: told.append("then b"))
    assert notebook.written == []
    ends.flush()
    assert (notebook.written, told) == ([["a", "b"]], [])
    await notebook.end(None, None)
    assert told == ["then b", "a", "b"]


async def test_what_found_no_room_is_written_again_and_before_what_came_later() -> None:
    notebook, ends = behind(delay_s=3600.0, retry_s=3600.0)
    told: list[str] = []
    ends.put(end("a"), lambda: told.append("a"))
    ends.put(end("b"))
    ends.flush()
    await notebook.end(DiskFullError("full"), None)
    assert (ends.is_behind, told) == (True, [])
    ends.put(end("c"))
    ends.flush()
    await notebook.end(None, None)
    assert notebook.written == [["a", "b"], ["a", "c"]]
    assert (ends.is_behind, told) == (False, ["a"])


async def test_what_can_never_be_written_is_given_up_and_whoever_waits_is_told() -> None:
    notebook, ends = behind(delay_s=3600.0)
    told: list[str] = []
    ends.put(end("a"), lambda: told.append("a"))
    ends.flush()
    await notebook.end(ValueError("no database takes it"))
    assert (ends.is_behind, told) == (False, ["a"])


async def test_notes_ride_with_a_promise_once_they_have_waited_their_time() -> None:
    notebook, ends = behind(delay_s=3600.0)
    ends.put(end("a"))
    ends.ride()
    assert notebook.written == []
    notebook, ends = behind(delay_s=0.0)
    ends.ride()
    ends.put(end("a"))
    ends.ride()
    assert notebook.written == [["a"]]


async def test_what_found_no_room_waits_for_its_next_try_and_does_not_ride() -> None:
    notebook, ends = behind(delay_s=0.0, retry_s=3600.0)
    ends.put(end("a"))
    ends.flush()
    await notebook.end(DiskFullError("full"))
    ends.put(end("b"))
    ends.ride()
    assert notebook.written == [["a"]]

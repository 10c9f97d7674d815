"""Members that join to add up gradients: whatever fails there costs time, and not a bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pools import EngineWorker, Run, always_split, opened, torch_member

from tinkex.engine.collectives.process_group import PeerLost, ProcessGroup
from tinkex.engine.exchange import meetings
from tinkex.engine.exchange.reduction import reduce
from tinkex.server.process.config import ServerConfig
from tinkex.server.serve import make_pool
from tinkex.server.workers import gradient_exchange

Reduce = Callable[..., Any]


@pytest.fixture(autouse=True)
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    always_split(monkeypatch)
    monkeypatch.setattr(gradient_exchange, "GRACE_S", 0.5)


async def run_of(size: int, tiny: str, folder: Path, timeout_s: float) -> tuple[Any, str, Any]:
    members = [torch_member(deterministic=True) for _ in range(size)]
    async with opened(members, folder / "exchange", meeting_timeout_s=timeout_s) as pool:
        run = Run(pool, tiny)
        await run.create()
        await run.until_shared(size)
        await run.steps(3)
        return run.seen, await run.saved(folder / "end"), pool.exchange


@pytest.mark.parametrize(
    ("settings", "meets"),
    [
        ({}, True),
        ({"meeting_timeout_s": 0.0}, False),
        ({"engine": "toy"}, False),
        ({"group_size": 2}, False),
    ],
)
def test_who_meets_is_a_matter_of_settings(
    tmp_path: Path, settings: dict[str, Any], meets: bool
) -> None:
    config = ServerConfig(data_dir=tmp_path, devices=("cpu",), num_workers=2, **settings)
    used = make_pool(config).exchange
    assert used is not None
    assert used.meets == meets


def cannot_meet(*_: Any, **__: Any) -> ProcessGroup:
    raise PeerLost("member 0 of 2 found no meeting: no route to host")


def loses_the_last_answer(meeting: ProcessGroup, *args: Any) -> Any:
    """The first one has the sum, the other one does not."""
    total = reduce(meeting, *args)
    if meeting.rank:
        raise PeerLost("another one is gone in the middle of a swap")
    return total


def hangs(meeting: ProcessGroup, *args: Any) -> Any:
    if meeting.rank:
        threading.Event().wait()
    return reduce(meeting, *args)


@pytest.mark.parametrize(
    ("name", "broken", "timeout_s"),
    [("join", cannot_meet, 60.0), ("reduce", loses_the_last_answer, 60.0), ("reduce", hangs, 4.0)],
)
async def test_members_whose_meeting_fails_use_files_and_lose_nothing(
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Reduce,
    timeout_s: float,
) -> None:
    seen, end, _ = await run_of(1, tiny, tmp_path / "one", 0.0)
    monkeypatch.setattr(meetings, name, broken)
    again, same_end, used = await run_of(2, tiny, tmp_path / "two", timeout_s)
    assert (again, same_end) == (seen, end)
    assert used.num_meetings == 0
    assert used.num_by_files > 0


async def test_a_member_that_comes_back_is_met_anew(tiny: str, tmp_path: Path) -> None:
    members: list[EngineWorker] = [torch_member(deterministic=True) for _ in range(2)]
    folder = tmp_path / "exchange"
    async with opened(members, folder, meeting_timeout_s=60.0) as pool:
        run = Run(pool, tiny)
        for number in (1, 2):
            await run.create()
            await run.until_shared(2)
            await run.train(9)
            await run.step()
            await run.train(9)
            await run.step()
            assert pool.exchange is not None
            assert pool.exchange.num_meetings == 2 * number
            assert len(list(folder.iterdir())) == 1, "one place, used again"
            placement = pool.place("a")
            await run.train(9)
            await members[number - 1].die()
            assert pool.place("a") is not placement, "its owner restores it"
        assert pool.exchange.num_by_files == 0


async def test_two_runs_that_step_at_once_do_not_wait_for_each_other_crosswise(
    tiny: str, tmp_path: Path
) -> None:
    """Each is led by another member, so each member hears of them in another order."""

    async def both(size: int, folder: Path) -> list[Any]:
        members = [torch_member(deterministic=True) for _ in range(size)]
        async with opened(members, folder, meeting_timeout_s=60.0) as pool:
            runs = [Run(pool, tiny, name, seed) for seed, name in enumerate("ab")]
            await asyncio.gather(*(run.create() for run in runs))
            await asyncio.gather(*(run.until_shared(size) for run in runs))
            await asyncio.gather(*(run.steps(4) for run in runs))
            assert pool.exchange is not None
            assert pool.exchange.num_by_files == 0
            return [run.seen for run in runs]

    assert await both(2, tmp_path / "two") == await both(1, tmp_path / "one")

"""Members that add up gradients in a process group: whatever fails there costs time, and no bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import app_world
import pytest
from app_world import open_app
from pools import EngineWorker, Run, always_split, opened, torch_member
from test_faults import WireRun, tiny_model

from tinkex.engine.all_reduce import reduction
from tinkex.engine.all_reduce.reduction import reduce
from tinkex.engine.collectives.process_group import PeerLost, ProcessGroup
from tinkex.server.process.config import ServerConfig
from tinkex.server.serve import make_pool
from tinkex.server.workers import gradient_groups
from tinkex.server.workers.pool import Pool

Reduce = Callable[..., Any]


@pytest.fixture(autouse=True)
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    always_split(monkeypatch)
    monkeypatch.setattr(gradient_groups, "GRACE_S", 0.5)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, True),
        ({"all_reduce_timeout_s": 0.0}, False),
        ({"engine": "toy"}, True),
        ({"group_size": 2}, True),
    ],
)
def test_who_shares_a_run_is_a_matter_of_settings(
    tmp_path: Path, settings: dict[str, Any], share: bool
) -> None:
    config = ServerConfig(data_dir=tmp_path, devices=("cpu",), num_workers=2, **settings)
    assert (make_pool(config).groups is not None) == share


def cannot_join(*_: Any, **__: Any) -> ProcessGroup:
    raise PeerLost("member 0 of 2 found no process group: no route to host")


def loses_the_last_answer(group: ProcessGroup, *args: Any) -> Any:
    """The first one has the sum, the other one does not."""
    total = reduce(group, *args)
    if group.rank:
        raise PeerLost("another one is gone in the middle of a swap")
    return total


def hangs(group: ProcessGroup, *args: Any) -> Any:
    if group.rank:
        threading.Event().wait()
    return reduce(group, *args)


async def losses(folder: Path, tiny: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The losses of a run of three steps over the wire, whose workers share it if they can."""
    monkeypatch.setattr(app_world, "make_pool", lambda config: pool)
    async with open_app(folder, engine="torch", models=(tiny,), deterministic=True) as world:
        run = WireRun(world, await tiny_model(world, await world.session(), 0, tiny))
        await run.step()
        if pool.size > 1:
            await run.shared(pool.size)
        for _ in range(3):
            await run.step()
        return run.losses, len(run.members)


@pytest.mark.parametrize(
    ("name", "broken", "timeout_s"),
    [("join", cannot_join, 60.0), ("reduce", loses_the_last_answer, 60.0), ("reduce", hangs, 4.0)],
)
async def test_members_that_cannot_come_together_cost_a_replay_and_share_no_more(
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Reduce,
    timeout_s: float,
) -> None:
    alone = Pool([torch_member(deterministic=True)], deterministic=True)
    expected, _ = await losses(tmp_path / "one", tiny, alone, monkeypatch)
    monkeypatch.setattr(reduction, name, broken)
    pool = Pool(
        [torch_member(deterministic=True) for _ in range(2)],
        rendezvous=tmp_path / "rendezvous",
        deterministic=True,
        all_reduce_timeout_s=timeout_s,
    )
    assert await losses(tmp_path / "two", tiny, pool, monkeypatch) == (expected, 1)
    assert pool.groups is not None
    assert pool.groups.num_sums == 0


async def test_groups_of_devices_share_a_run_to_the_bit(tiny: str, tmp_path: Path) -> None:
    seen, ends = [], []
    for size in (1, 2):
        members = [torch_member(deterministic=True, group=("cpu", "cpu")) for _ in range(size)]
        async with opened(members, tmp_path / f"{size}-rendezvous") as pool:
            run = Run(pool, tiny)
            await run.create()
            await run.until_shared(size)
            await run.steps(2)
            await run.train(9)
            await run.saved(tmp_path / f"{size}-half", with_gradients=True)
            await run.step()
            seen.append(run.seen)
            ends.append(await run.saved(tmp_path / f"{size}-end"))
    assert run.most_workers == 2
    assert seen[0] == seen[1]
    assert ends[0] == ends[1]


async def test_a_member_that_comes_back_forms_a_new_group(tiny: str, tmp_path: Path) -> None:
    members: list[EngineWorker] = [torch_member(deterministic=True) for _ in range(2)]
    folder = tmp_path / "rendezvous"
    async with opened(members, folder) as pool:
        run = Run(pool, tiny)
        for number in (1, 2):
            await run.create()
            await run.until_shared(2)
            await run.train(9)
            await run.step()
            await run.train(9)
            await run.step()
            assert pool.groups is not None
            assert pool.groups.num_sums == 2 * number
            assert len(list(folder.iterdir())) == 1, "one address, used again"
            placement = pool.place("a")
            await run.train(9)
            await members[number - 1].die()
            assert pool.place("a") is not placement, "its owner restores it"


async def test_two_runs_that_step_at_once_do_not_wait_for_each_other_crosswise(
    tiny: str, tmp_path: Path
) -> None:
    """Each is led by another member, so each member hears of them in another order."""

    async def both(size: int, folder: Path) -> list[Any]:
        members = [torch_member(deterministic=True) for _ in range(size)]
        async with opened(members, folder) as pool:
            runs = [Run(pool, tiny, name, seed) for seed, name in enumerate("ab")]
            await asyncio.gather(*(run.create() for run in runs))
            await asyncio.gather(*(run.until_shared(size) for run in runs))
            await asyncio.gather(*(run.steps(4) for run in runs))
            assert pool.groups is not None
            assert (pool.groups.num_sums > 0) == (size > 1)
            return [run.seen for run in runs]

    assert await both(2, tmp_path / "two") == await both(1, tmp_path / "one")

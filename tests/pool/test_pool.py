"""A pool is one worker made of several: models have placements, samples go anywhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_world import open_app
from pools import child, opened
from wire_client import loss_of

from tinkex.engine.jobs import SampleJob, SampleResult, Tokens
from tinkex.errors import ConfigError, InvalidInputError, WorkerLostError
from tinkex.server.process.config import ServerConfig
from tinkex.server.serve import make_worker


def open_pool(size: int, engine: str = "toy") -> Any:
    return opened([child(engine) for _ in range(size)])


def sample(prompt: Sequence[int], number: int = 0, **options: Any) -> SampleJob:
    given = {"max_tokens": 8, "seed": 5, "stop_tokens": ()} | options
    return SampleJob(
        job_id=f"s{number}",
        base_model="toy",
        adapter_folder=None,
        prompt=np.array(prompt, dtype=np.int64),
        **given,  # type: ignore[arg-type]
    )


async def test_the_death_of_one_worker_is_no_business_of_the_models_on_the_other(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path, num_workers=2) as world:
        pool = world.service.workers.pool
        await asyncio.gather(*(member.wait_ready() for member in pool.members))
        session = await world.session()
        models = [await world.model(session, number) for number in range(6)]
        leaders = [pool.place(model).leader.worker for model in models]
        assert [leaders.count(member) for member in pool.members] == [3, 3]
        losses = [
            loss_of(await world.result((await world.train(model, 1, [1, 2, 3])).json()))
            for model in models
        ]
        assert len(set(losses)) == 1
        victim, other = pool.members
        before = {model: pool.place(model) for model in models}
        os.kill(victim.pid, 9)  # type: ignore[attr-defined]
        steps = [(await world.step(model, 2)).json() for model in models]
        for step in steps:
            assert (await world.result(step))["metrics"]["step:max"] == 1.0
        for model, leader in zip(models, leaders, strict=True):
            assert (pool.place(model) is before[model]) == (leader is other)


async def test_samples_wait_for_the_shortest_line_and_go_on_without_a_dead_member() -> None:
    async with open_pool(2, "toy:token_latency_s=0.05") as pool:
        jobs = [pool.post(sample([number], number)) for number in range(4)]
        lines = [pool._router.backlog.of(member) for member in pool.members]
        assert lines[0] == lines[1] > 0
        os.kill(pool.members[0].pid, 9)  # type: ignore[attr-defined]
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        assert sum(isinstance(end, SampleResult) for end in ends) == 2
        assert sum(isinstance(end, WorkerLostError) for end in ends) == 2
        assert isinstance(await pool.post(sample([7], 9)), SampleResult)
        assert [pool._router.backlog.of(member) for member in pool.members] == [0, 0]


async def test_a_prompt_goes_where_its_beginning_is_cached_unless_the_line_is_much_longer() -> None:
    async with open_pool(2, "toy:token_latency_s=0.02") as pool:
        while len(pool._with_model("toy")) < 2:  # those without the model are not asked
            await asyncio.sleep(0.01)
        prefix = list(range(3, 3 + 256))
        first = pool.post(sample([*prefix, 1], 1, max_tokens=4))
        holder = max(pool.members, key=pool._router.backlog.of)
        await first
        other = next(member for member in pool.members if member is not holder)
        await pool.post(sample([500], 2, max_tokens=1))  # whoever took it, both lines are empty now
        second = pool.post(sample([*prefix, 2], 3, max_tokens=4))
        assert pool._router.backlog.of(holder) > pool._router.backlog.of(other) == 0
        result = await second
        assert isinstance(result, SampleResult)
        assert result.prompt_cache_hit_tokens == 256
        long = [pool.post(sample([*prefix, 2], n, max_tokens=512)) for n in range(4, 8)]
        assert pool._router.backlog.of(other) > 0, "nobody stands behind a line that long"
        for job in long:
            job.cancel()


async def test_a_pool_grows_while_it_works_and_its_gates_with_it(tmp_path: Path) -> None:
    async with open_app(tmp_path, engine="toy:token_latency_s=0.01") as world:
        place, config = world.service.workers, world.service.config
        before = place.sampling.num_slots
        running = [asyncio.ensure_future(place.pool.wait_ready())]
        await asyncio.gather(*running)
        jobs = [place.pool.post(sample([n], n, max_tokens=20)) for n in range(4)]
        added = make_worker(config, 1, "cpu")
        await place.pool.add(added)
        await added.wait_ready()
        assert place.sampling.num_slots == 2 * before
        assert len(await asyncio.gather(*jobs)) == 4
        jobs = [place.pool.post(sample([n], n)) for n in range(2)]
        assert place.pool._router.backlog.of(added) > 0
        await asyncio.gather(*jobs)
        await place.pool.remove(added)
        assert place.sampling.num_slots == before


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({}, ["auto"]),
        ({"num_workers": 2}, ["auto:0", "auto:1"]),
        ({"num_workers": 2, "devices": ("cpu",)}, ["cpu", "cpu"]),
        ({"devices": ("cuda:0,cuda:1",)}, ["cuda:0", "cuda:1"]),
        ({"devices": ("cuda:0", "cuda:1"), "num_workers": 2}, ["cuda:0", "cuda:1"]),
    ],
)
def test_every_worker_has_its_device(settings: dict[str, Any], devices: list[str]) -> None:
    assert ServerConfig(**settings).worker_devices == devices


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": -1},
        {"num_workers": 100_000},
        {"num_workers": 3, "devices": ("cuda:0", "cuda:1")},
        {"num_workers": 2, "devices": ("cuda:0",)},
    ],
)
def test_more_workers_than_devices_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        ServerConfig(**settings)


async def test_the_samples_of_one_prompt_split_and_have_the_same_bits() -> None:
    seen: list[Tokens] = []
    job = sample(
        range(3, 20), 1, num_samples=10, prompt_logprobs=True, topk_prompt_logprobs=2, stream=True
    )
    async with open_pool(1) as one, open_pool(3) as three:
        whole = await one.post(job)
        deals = three._router.deal(job, [], three.members)
        assert sorted(deal.count for deal in deals) == [2, 4, 4]
        split = await three.post(job, lambda event: seen.append(event))  # type: ignore[arg-type]
    assert isinstance(whole, SampleResult)
    assert isinstance(split, SampleResult)
    assert [s.tokens.tolist() for s in split.sequences] == [
        s.tokens.tolist() for s in whole.sequences
    ]
    assert [s.logprobs.tobytes() for s in split.sequences] == [
        s.logprobs.tobytes() for s in whole.sequences
    ]
    assert split.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert split.prompt_logprobs.tobytes() == whole.prompt_logprobs.tobytes()
    assert split.topk_prompt is not None
    assert (split.num_prompt_tokens, split.num_sampled_tokens) == (17, whole.num_sampled_tokens)
    assert {event.job_id for event in seen} == {"s1"}
    assert {event.sample_index for event in seen} == set(range(10))


async def test_a_long_prompt_is_read_once_and_a_refusal_ends_all_parts() -> None:
    async with open_pool(2) as pool:
        long = sample(range(3, 4003), 1, num_samples=8, max_tokens=16)
        assert len(pool._router.deal(long, [], pool.members)) == 1
        with pytest.raises(InvalidInputError, match="outside the vocabulary"):
            await pool.post(sample([10**9], 2, num_samples=16))
        cancelled = pool.post(sample([4], 3, num_samples=16))
        cancelled.cancel()
        assert isinstance(await pool.post(sample([4], 4)), SampleResult)
        assert [pool._router.backlog.of(member) for member in pool.members] == [0, 0]


async def test_the_rendezvous_folder_may_be_elsewhere_and_is_emptied(tmp_path: Path) -> None:
    """On a memory file system, say: it is a mount or a link then."""
    elsewhere = tmp_path / "memory"
    (elsewhere / "old-join").mkdir(parents=True)
    (elsewhere / "old.grad").write_bytes(b"old")
    (tmp_path / "rendezvous").symlink_to(elsewhere)
    async with opened([child()], tmp_path / "rendezvous"):
        assert list(elsewhere.iterdir()) == []
        assert (tmp_path / "rendezvous").is_symlink()

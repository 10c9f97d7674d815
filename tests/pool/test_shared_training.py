"""Several members train one adapter as one would: to the bit when that was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pools import TOY, Run, always_split, child, datums, hash_of, opened, torch_member
from training import custom_graph

from tinkex.engine.jobs import LoadAdapterJob, SaveAdapterJob, TrainDatum
from tinkex.errors import InvalidInputError, WorkerLostError


@pytest.fixture(autouse=True)
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    always_split(monkeypatch)


def custom_data(rng: np.random.Generator, num: int) -> tuple[TrainDatum, ...]:
    return tuple(
        TrainDatum(
            tokens=datum.tokens,
            inputs={
                "target_tokens": datum.inputs["target_tokens"],
                "advantages": datum.inputs["weights"],
            },
        )
        for datum in datums(rng, num)
    )


async def whole_run(run: Run, folder: Path) -> str:
    """Losses of each kind, forward, steps, a save in the middle of a step, and a load of it."""
    await run.create()
    await run.until_shared(len(run.pool.members))
    await run.steps(4)
    await run.train(7, backward=False)
    data = custom_data(run.rng, 6)
    await run.train(data=data, loss_fn="custom", custom_loss=custom_graph())
    await run.train(5)
    await run.saved(folder / "half", with_gradients=True)
    await run.train(11)
    await run.step()
    before = await run.saved(folder / "before")
    await run.post(
        LoadAdapterJob, base_model=run.base_model, folder=str(folder / "half"), with_optimizer=True
    )
    await run.train(11, data=datums(np.random.default_rng(5), 11))
    await run.step()
    await run.steps(2)
    return before + await run.saved(folder / "after")


@pytest.mark.parametrize("size", [2, 4])
async def test_any_number_of_toys_gives_the_same_bits(tmp_path: Path, size: int) -> None:
    seen, ends = [], []
    for number in (1, size):
        members = [child(TOY) for _ in range(number)]
        folder = tmp_path / str(number)
        async with opened(members, folder / "rendezvous") as pool:
            run = Run(pool, "toy")
            ends.append(await whole_run(run, folder))
            seen.append(run.seen)
    assert run.most_workers == size
    assert seen[0] == seen[1]
    assert ends[0] == ends[1]
    left = [file.suffix for file in (folder / "rendezvous").iterdir()]
    assert set(left) <= {".group"}, "only where members found each other"


@pytest.mark.parametrize("size", [2, 4])
async def test_any_number_of_engines_gives_the_same_bits(
    tiny: str, tmp_path: Path, size: int
) -> None:
    seen, ends = [], []
    for number in (1, size):
        folder = tmp_path / str(number)
        members = [torch_member(deterministic=True) for _ in range(number)]
        async with opened(members, folder / "rendezvous") as pool:
            run = Run(pool, tiny)
            ends.append(await whole_run(run, folder))
            seen.append(run.seen)
            assert pool.groups is not None
            assert (pool.groups.num_sums > 0) == (number > 1)
    assert run.most_workers == size
    assert seen[0] == seen[1]
    assert ends[0] == ends[1]


async def test_without_determinism_the_numbers_are_equal_within_rounding(
    tiny: str, tmp_path: Path
) -> None:
    told, weights = [], []
    for number in (1, 3):
        members = [torch_member(deterministic=False) for _ in range(number)]
        folder = tmp_path / str(number)
        async with opened(members, folder / "rendezvous", deterministic=False) as pool:
            run = Run(pool, tiny)
            await run.create()
            await run.until_shared(number)
            results = []
            for _ in range(3):
                results += [await run.train(9), await run.train(4)]
                await run.step(1e-3)
            told.append(results)
            await run.saved(folder / "end")
            from safetensors.numpy import load_file

            weights.append(load_file(folder / "end" / "adapter_model.safetensors"))
    assert run.most_workers == 3
    for one, other in zip(*told, strict=True):
        for ours, theirs in zip(one.outputs, other.outputs, strict=True):
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-5, rtol=1e-5)
        assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], abs=1e-4)
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], atol=1e-6, rtol=1e-4)


async def test_two_tenants_on_one_pool_do_not_touch_each_other(tmp_path: Path) -> None:
    async def alone(adapter_id: str, seed: int) -> tuple[list[Any], str]:
        async with opened([child(TOY)], tmp_path / f"{adapter_id}-rendezvous") as pool:
            run = Run(pool, "toy", adapter_id, seed)
            await run.create()
            await run.steps(4)
            return run.seen, await run.saved(tmp_path / f"{adapter_id}-alone")

    expected = [await alone("a", 1), await alone("b", 2)]
    async with opened([child(TOY) for _ in range(3)], tmp_path / "rendezvous") as pool:
        runs = [Run(pool, "toy", "a", 1), Run(pool, "toy", "b", 2)]
        await asyncio.gather(*(run.create() for run in runs))
        await asyncio.gather(*(run.steps(4) for run in runs))
        for run, (seen, end) in zip(runs, expected, strict=True):
            assert run.seen == seen
            assert await run.saved(tmp_path / f"{run.adapter_id}-shared") == end


async def test_a_pass_that_one_member_refuses_leaves_no_trace_that_is_used(tmp_path: Path) -> None:
    async with opened([child(TOY) for _ in range(2)], tmp_path / "rendezvous") as pool:
        run = Run(pool, "toy")
        await run.create()
        await run.until_shared(2)
        await run.train(4)  # how long a backward takes is not known before
        await run.step()
        placement = pool.place("a")
        data = list(datums(run.rng, 8))
        bad = dict(data[5].inputs) | {"target_tokens": data[5].inputs["target_tokens"] * 0 + 10**9}
        data[5] = TrainDatum(tokens=data[5].tokens, inputs=bad)
        with pytest.raises(InvalidInputError, match=r"data\[5\].*outside the vocabulary"):
            await run.train(data=tuple(data))
        assert pool.place("a") is not placement, "its owner restores it"
        save = SaveAdapterJob(job_id="s", adapter_id="a", folder=str(tmp_path / "s"))
        with pytest.raises(WorkerLostError):
            await placement.post(save)


async def test_a_small_pass_stays_on_one_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.workers.placement.PART_S", 0.01)
    engine = "toy:train_token_latency_s=1e-3"
    async with opened([child(engine) for _ in range(2)], tmp_path / "rendezvous") as pool:
        run = Run(pool, "toy")
        await run.create()
        for _ in range(6):
            await run.train(1)
            await run.step()
        assert len(pool.place("a").leases) == 1, "one datum cannot be split"
        for _ in range(100):
            await run.train(40)
            await run.step()
            if run.most_workers == 2:
                break
        assert run.most_workers == 2
        for _ in range(10):
            await run.train(1)
            await run.step()
        assert len(pool.place("a").leases) == 1, "it is not shared for ever"


async def test_pipelined_calls_keep_their_order(tmp_path: Path) -> None:
    """Nobody waits for an answer before the next call: rounds of a step lie between passes."""
    ends = []
    for number in (1, 3):
        members = [child(TOY) for _ in range(number)]
        async with opened(members, tmp_path / f"{number}-rendezvous") as pool:
            run = Run(pool, "toy")
            await run.create()
            await run.until_shared(number)
            calls = []
            for _ in range(6):
                calls += [asyncio.ensure_future(run.train(10)), asyncio.ensure_future(run.step())]
                await asyncio.sleep(0)
            await asyncio.gather(*calls)
            ends.append(await run.saved(tmp_path / str(number)))
    assert ends[0] == ends[1]
    assert hash_of(tmp_path / "1") == hash_of(tmp_path / "3")

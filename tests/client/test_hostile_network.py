"""Whatever the network does, every call ends in the right result or the right error.

A thousand seeded schedules (R8, R11, R13, R17): random programs against a correct server behind a
hostile network, in virtual time. `Hang` or a timeout of the virtual clock would be a hang.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from typing import Any

import pytest
from hostile import ANYWHERE, ON_POLLS, Network, Server
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.session.holder import Holder

SEEDS_PER_TEST = 50
ERRORS = {
    "user": tinkex.RequestFailedError,
    "server": tinkex.RequestFailedError,
    "gone": tinkex.PromiseLostError,
    "refused": tinkex.RetrieveError,
    "bad": tinkex.BadRequestError,
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tinkex")  # thousands of warnings are expected


@pytest.mark.parametrize("block", range(20))
def test_a_thousand_schedules_end_right(block: int) -> None:
    injected: set[str] = set()
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        schedule = Schedule(seed)
        try:
            run_virtual(schedule.run())
        except BaseException as exc:
            raise AssertionError(f"schedule {seed}: {exc!r}") from exc
        injected |= set(schedule.network.kinds)
    assert injected == {*ANYWHERE, *ON_POLLS}, "the schedules no longer cover every fault"


class Schedule:
    """One random program, its server and its network."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.server = Server(
            flags={
                "fwdbwd_max_chunk_len": rng.choice([1, 2, 1024]),
                "parallel_fwdbwd_chunks": rng.random() < 0.7,
                "proto_compress_fwdbwd": rng.random() < 0.3,
                "sample_use_retrieve_futures": rng.random() < 0.6,
                "tinkex_sample_batch": rng.random() < 0.5,
                "sample_no_retries": False,
            },
            has_config=rng.random() > 0.15,
            jwt=rng.random() < 0.2,
            compute_s=rng.choice([0.0, 0.5, 45.0]),
        )
        if not self.server.has_config:
            self.server.jwt = False
        self.network = Network(self.server, rng, rate=rng.choice([0.0, 0.1, 0.3, 0.5]))
        for seq_id in range(1, 20):
            if rng.random() < 0.15:
                self.server.doom_seq[seq_id] = rng.choice(list(ERRORS))
        self.server.lose_samples = {n for n in range(30) if rng.random() < 0.2}
        self.next_seq_id = 1
        self.num_losses = 0

    async def run(self) -> None:
        config = ClientConfig(base_url="http://hostile.test", api_key="tml-k", telemetry=False)
        service = tinkex.ServiceClient(config=config)
        service._holder = Holder(config, make_backend=self.network.make_backend)
        client = await service.create_lora_training_client_async("m", rank=4)
        expected = [self.submit(client) for _ in range(self.rng.randint(2, 6))]
        await asyncio.gather(*(self.check(*item) for item in expected))
        await self.sample(client)
        self.check_order(client.model_id)
        assert self.server.violations == []
        await service.close("success")
        # Saying goodbye is bounded in time, so a bad network may swallow it.
        assert self.server.finished[:1] == ["success"] or self.network.rate > 0
        assert self.network.open <= 0 or self.network.kinds.get("blank_400", 0) > 0
        gc.collect(0)

    # -- training

    def submit(self, client: tinkex.TrainingClient) -> tuple[Any, Any, list[str]]:
        kind = self.rng.choice(["pass", "pass", "step", "save", "both"])
        if kind == "step":
            rate = self.rng.random()
            future: Any = client.optim_step(types.AdamParams(learning_rate=rate))
            return future, lambda r: r.metrics == {"rate:mean": rate}, self.take(1)
        if kind == "save":
            name = f"n{self.next_seq_id}"
            path = f"tinker://{client.model_id}/weights/{name}"
            return client.save_state(name), lambda r: r.path == path, self.take(1)
        data = [self.datum() for _ in range(self.rng.randint(1, 5))]
        total = float(sum(sum(d.model_input.to_ints()) for d in data))
        max_len = self.server.flags["fwdbwd_max_chunk_len"] if self.server.has_config else 128
        num_chunks = -(-len(data) // max_len)
        if kind == "both":
            future = client.train_step(data, "cross_entropy", types.AdamParams())
            return future, lambda r: r.loss == total, self.take(num_chunks + 1)
        future = client.forward_backward(data, "cross_entropy")
        firsts = [d.model_input.to_ints()[0] for d in data]

        def right(result: types.ForwardBackwardOutput) -> bool:
            seen = [int(o["logprobs"].data[0]) for o in result.loss_fn_outputs]
            return result.metrics == {"loss:sum": total} and seen == firsts

        return future, right, self.take(num_chunks)

    def take(self, number: int) -> list[str]:
        """The fates of the next sequence numbers."""
        ids = range(self.next_seq_id, self.next_seq_id + number)
        self.next_seq_id += number
        return [self.server.doom_seq[i] for i in ids if i in self.server.doom_seq]

    def datum(self) -> types.Datum:
        tokens = [self.rng.randint(1, 1000) for _ in range(self.rng.randint(1, 8))]
        return types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens})

    async def check(self, future: Any, is_right: Any, fates: list[str]) -> None:
        if self.rng.random() < 0.1:
            future.cancel()
            with pytest.raises(asyncio.CancelledError):
                await future
            return
        if not fates:
            assert is_right(await future)
            return
        with pytest.raises(tuple(ERRORS[fate] for fate in fates)) as caught:
            await future
        if isinstance(caught.value, tinkex.RequestFailedError):
            assert caught.value.category in fates
            assert caught.value.request_id

    def check_order(self, model_id: str) -> None:
        """Every number was sent, and only chunks of one call may overtake each other (R11)."""
        seen = [seq_id for model, seq_id in self.server.arrivals if model == model_id]
        assert sorted(seen) == list(range(1, len(seen) + 1))
        window = 8 if self.server.flags["fwdbwd_max_chunk_len"] < 1024 else 1
        assert all(abs(seq_id - place) < window for place, seq_id in enumerate(seen, 1))

    # -- sampling

    async def sample(self, client: tinkex.TrainingClient) -> None:
        for seq_id in range(self.next_seq_id, self.next_seq_id + 3):
            self.server.doom_seq.pop(seq_id, None)
        sampler = await client.save_weights_and_get_sampling_client_async()
        prompts = [[self.rng.randint(1, 99) for _ in range(4)] for _ in range(10)]
        futures = [
            sampler.sample(types.ModelInput.from_ints(p), 2, types.SamplingParams(max_tokens=4))
            for p in prompts
        ]
        doomed = [future for future in futures if self.rng.random() < 0.2]
        await asyncio.sleep(self.rng.uniform(0.0, 3.0))
        for future in doomed:
            future.cancel()
        answers = await asyncio.gather(*futures, return_exceptions=True)
        ids: list[str] = []
        for prompt, future, answer in zip(prompts, futures, answers, strict=True):
            if future in doomed and isinstance(answer, asyncio.CancelledError):
                continue
            assert isinstance(answer, types.SampleResponse), repr(answer)
            assert [s.tokens for s in answer.sequences] == [prompt[::-1]] * 2
            ids += [s.sequence_id for s in answer.sequences]
        if self.server.has_config:
            assert len(set(ids)) == len(ids)

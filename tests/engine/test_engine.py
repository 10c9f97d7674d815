"""The engine keeps order per adapter, shares the device fairly, and survives what users send."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_world import VOCAB, random_datum
from patience import until

from tinkex.engine import jobs
from tinkex.engine.checkpoint import writer
from tinkex.engine.checkpoint.snapshots import snapshot_room
from tinkex.engine.numerics.memory_in_use import tensor_bytes
from tinkex.engine.numerics.ops import CPU
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.torch.config import EngineConfig
from tinkex.engine.train import passes
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.passes import PassRunner
from tinkex.errors import ConfigError

NUM_RUNS = 10


def weighted(weights: list[float], length: int | None = None, token: int = 2) -> jobs.TrainDatum:
    """A datum of one token over and over, as long as its weights unless told otherwise."""
    tokens = np.full(length or len(weights), token)
    inputs = {"target_tokens": np.ones_like(tokens), "weights": np.array(weights, np.float32)}
    return jobs.TrainDatum(tokens=tokens, inputs=inputs)


def test_a_pipelined_loop_trains_saves_and_samples_what_it_learned(start, tmp_path):
    """R31: everything is queued at once; order per adapter makes it right."""
    client = start()
    created = client.create()
    losses = []
    for _ in range(150):
        losses.append(client.train())
        client.step(lr=0.01)
    saved = client.save(tmp_path / "s", for_sampling=True)
    assert saved.result.size_bytes > 0
    assert any(isinstance(e, jobs.Progress) and "loading" in e.text for e in created.events)
    values = [ticket.result.metrics["loss:sum"] for ticket in losses]
    assert values[-1] < values[0] / 50
    tokens = np.append(random_datum(12).tokens, random_datum(12).inputs["target_tokens"][-1])
    sampled = client.sample(tmp_path / "s", prompt=tokens[:1], max_tokens=12, temperature=0.0)
    assert sampled.result.sequences[0].tokens.tolist() == tokens[1:].tolist()


def test_sampler_and_trainer_agree_on_logprobs(start, tmp_path):
    client = start()
    client.create()
    client.train()
    client.step(lr=0.05)
    client.save(tmp_path / "s", for_sampling=True).wait()
    sampled = client.sample(tmp_path / "s", num_samples=4, max_tokens=20, seed=1).result
    data = []
    for sequence in sampled.sequences:
        tokens = np.concatenate([[3, 4, 5], sequence.tokens])
        weight = np.concatenate([np.zeros(2), np.ones(20)]).astype(np.float32)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([np.zeros(2), sequence.logprobs]).astype(np.float32),
            "advantages": weight,
        }
        data.append(jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs))
    result = client.train(data=tuple(data), loss_fn="importance_sampling").result
    for datum_, output in zip(data, result.outputs, strict=True):
        np.testing.assert_allclose(output["logprobs"][2:], datum_.inputs["logprobs"][2:], atol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(-80, abs=1e-3)


def test_waiting_jobs_of_many_tenants_share_one_pass_and_nothing_else(start, monkeypatch):
    client, passes_run, run_pass = start(), [], PassRunner.run_pass

    def counted(*args: Any) -> None:
        passes_run.append(args)
        run_pass(*args)

    monkeypatch.setattr(PassRunner, "run_pass", counted)
    tenants = [f"t{i}" for i in range(6)]
    for i, name in enumerate(tenants):
        client.create(name, seed=i, rank=2 + i).wait()
    # A first long job holds the engine while the others arrive.
    holder = client.train("t0", data=(random_datum(200),))
    passes = [client.train(name, data=(random_datum(10, i),)) for i, name in enumerate(tenants)]
    together = [ticket.result for ticket in passes]
    holder.wait()
    assert len(passes_run) <= 3
    for i, name in enumerate(tenants):
        alone = client.train(name, data=(random_datum(10, i),)).result
        np.testing.assert_allclose(
            together[i].outputs[0]["logprobs"], alone.outputs[0]["logprobs"], atol=1e-5
        )


def test_deterministic_mode_gives_equal_bits_whatever_the_company(start, tmp_path):
    def run(crowded: bool) -> tuple[list[float], bytes]:
        client = start(deterministic=True)
        client.create("a")
        if crowded:
            client.create("b")
            client.create("c", rank=3)
            client.sample(max_tokens=40)
        tickets = []
        for i in range(4):
            if crowded:
                client.train("b", data=(random_datum(9, i),))
            tickets.append(client.train("a", data=(random_datum(12, i), random_datum(7, i))))
            if crowded:
                client.train("c", data=(random_datum(30, i),))
            client.step("a")
        folder = tmp_path / f"{crowded}"
        client.save(folder, "a").wait()
        losses = [ticket.result.metrics["loss:sum"] for ticket in tickets]
        return losses, (folder / "adapter_model.safetensors").read_bytes()

    assert run(False) == run(True)


def test_tokens_stream_while_a_long_batch_trains_and_both_end(start):
    client = start(trainer=TrainerConfig(max_tokens=64))
    client.create().wait()
    with client.held_up():
        long = client.train(data=tuple(random_datum(60, i) for i in range(80)))
        stream = client.sample(max_tokens=30, stream=True)
    assert stream.result.num_sampled_tokens == 30
    assert long.result.num_tokens == 4800
    assert client.ended[-2:] == [stream.job.job_id, long.job.job_id]


def test_a_short_job_does_not_wait_for_a_long_one_and_neither_changes(start):
    """One key with huge batches must not starve the small ones of others."""
    alone = start(trainer=TrainerConfig(max_tokens=64))
    many, few = tuple(random_datum(60, i) for i in range(40)), (random_datum(12, 99),)
    alone.create("big").wait()
    alone.create("small", seed=1).wait()
    expected = [alone.train("big", data=many).result, alone.train("small", data=few).result]
    client = start(trainer=TrainerConfig(max_tokens=64))
    client.create("big").wait()
    client.create("small", seed=1).wait()
    with client.held_up():
        long = client.train("big", data=many)
        after_long = client.step("big")
        short, stepped = client.train("small", data=few), client.step("small")
    results = [long.result, short.result]
    assert client.ended.index(short.job.job_id) < client.ended.index(long.job.job_id)
    assert client.ended.index(stepped.job.job_id) < client.ended.index(long.job.job_id)
    after_long.wait()
    assert client.ended[-2:] == [long.job.job_id, after_long.job.job_id], "in order, as ever"
    for got, wanted in zip(results, expected, strict=True):
        assert got.metrics["loss:sum"] == wanted.metrics["loss:sum"]


def test_two_long_jobs_take_turns_with_short_ones_only(start):
    client = start(trainer=TrainerConfig(max_tokens=64))
    for name in ("one", "two", "small"):
        client.create(name).wait()
    data = tuple(random_datum(60, i) for i in range(30))
    with client.held_up():
        longs = [client.train(name, data=data) for name in ("one", "two")]
        shorts = [client.train("small") for _ in range(5)]
    for ticket in [*longs, *shorts]:
        assert ticket.result.num_tokens > 0
    last = max(client.ended.index(ticket.job.job_id) for ticket in shorts)
    assert last < client.ended.index(longs[0].job.job_id)


def test_a_mixture_of_many_folders_gives_turns_between_them(start, tmp_path, monkeypatch):
    """Reading one large adapter holds the device for a second or more; a mixture has sixteen."""
    monkeypatch.setattr(passes, "TURN_S", 0.0)
    client = start()
    for name in ("own", "small"):
        client.create(name).wait()
    folder = str(tmp_path / "own")
    client.save(tmp_path / "own", "own").wait()
    mixture = ((folder, 0.25),) * 4
    loading = {"base_model": client.base, "folder": folder, "with_optimizer": False}
    with client.held_up():
        mixed = client.put(jobs.LoadAdapterJob, adapter_id="mix", mixture=mixture, **loading)
        dropped = client.put(jobs.DropAdapterJob, adapter_id="mix")
        short = client.train("small")
    dropped.wait()
    order = [client.ended.index(ticket.job.job_id) for ticket in (short, mixed, dropped)]
    assert order == sorted(order), "its own lane waits, others do not"
    assert isinstance(mixed.wait(), jobs.Done)


def test_memory_is_told_by_kind_and_given_back(start, tmp_path):
    """A worker held 6.5 GiB after 42 runs and 107 snapshots."""
    client = start(idle_s=0.2)

    def held(kind: str) -> int:
        return client.engine.heartbeat._held[kind]

    for number in range(NUM_RUNS):
        name = f"run{number}"
        client.create(name)
        client.train(name)
        client.step(name)
        for index in range(2):
            client.save(tmp_path / f"{name}-{index}", name, for_sampling=True).wait()
        client.sample(tmp_path / f"{name}-0", max_tokens=2).wait()
        if number == 0:
            one_run = tensor_bytes(client.engine.compute.bases.loaded[client.base].trainer.adapters)
    until(lambda: held("adapters") == NUM_RUNS * one_run)
    peak = dict(client.engine.heartbeat._held)
    assert peak["base"] > 0
    assert peak["snapshots"] > 0
    for number in range(NUM_RUNS):
        client.put(jobs.DropAdapterJob, adapter_id=f"run{number}")
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    until(lambda: not any(held(kind) for kind in ("adapters", "snapshots", "kv", "packed")))
    assert held("base") == peak["base"]
    client.create("again")
    assert client.sample(max_tokens=4).result.num_sampled_tokens == 4, "and it goes on"


def test_training_goes_on_under_an_endless_stream_of_samples(start):
    client = start()
    client.create().wait()
    with client.held_up():
        endless = [client.sample(max_tokens=250, prompt=np.array([2 + i])) for i in range(12)]
        ticket = client.train()
    ticket.wait()
    assert sum(job_id.startswith("Sample") for job_id in client.ended) < 12
    assert all(t.result.num_sampled_tokens == 250 for t in endless)


def test_a_snapshot_never_changes_while_its_adapter_trains_on(start, tmp_path):
    client = start()
    client.create()
    client.save(tmp_path / "s", for_sampling=True).wait()
    before = client.sample(tmp_path / "s", seed=3).result.sequences[0]
    client.train()
    client.step(lr=0.5).wait()
    after = client.sample(tmp_path / "s", seed=3).result.sequences[0]
    assert before.tokens.tolist() == after.tokens.tolist()
    np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-6)


def test_training_goes_on_while_a_save_is_written_and_the_folder_holds_its_turn(
    start, tmp_path, monkeypatch
):
    client, gate, write = start(), threading.Event(), writer.write
    client.create()
    client.train()
    monkeypatch.setattr(
        writer, "write", lambda *args, **how: (gate.wait(200), write(*args, **how))[1]
    )
    saved = client.save(tmp_path / "s", with_optimizer=True, with_gradients=True)
    norm = client.step(lr=0.5).result.metrics["grad_norm:mean"]
    expected = client.train().result.outputs[0]["logprobs"].tolist()
    assert saved.job.job_id not in client.ended
    gate.set()
    assert saved.result.size_bytes > 0
    folder = str(tmp_path / "s")
    loaded = {"adapter_id": "b", "base_model": client.base, "folder": folder}
    client.put(jobs.LoadAdapterJob, **loaded, with_optimizer=True)
    assert client.step("b", lr=0.5).result.metrics["grad_norm:mean"] == norm
    assert client.train("b").result.outputs[0]["logprobs"].tolist() == expected


def test_unnamed_weights_for_sampling_do_not_wait_for_a_checkpoint_being_written(
    start, tmp_path, monkeypatch
):
    client, gate, write = start(), threading.Event(), writer.write

    def slow(folder, image, *, sync):
        assert not sync or gate.wait(200)
        return write(folder, image, sync=sync)

    monkeypatch.setattr(writer, "write", slow)
    client.create()
    named = client.save(tmp_path / "state", with_optimizer=True)
    assert client.save(tmp_path / "s", for_sampling=True, ephemeral=True).result.size_bytes > 0
    sample = client.sample(tmp_path / "s", seed=3).result.sequences[0]
    assert named.job.job_id not in client.ended
    gate.set()
    assert named.result.size_bytes > 0
    client.engine.compute.snapshots.clear()
    again = client.sample(tmp_path / "s", seed=3).result.sequences[0]  # from the folder
    assert again.tokens.tolist() == sample.tokens.tolist()


def test_a_folder_written_anew_is_served_anew(start, tmp_path):
    """A reused name must not serve old weights, nor old cached prefixes."""
    client = start()
    prompt = np.arange(2, 40)
    client.create()
    client.save(tmp_path / "s", for_sampling=True).wait()
    old = client.sample(tmp_path / "s", prompt=prompt, temperature=0.0).result
    (tmp_path / "s").rename(tmp_path / "old")
    for _ in range(3):
        client.train()
        client.step(lr=0.1)
    client.save(tmp_path / "s").wait()
    new = client.sample(tmp_path / "s", prompt=prompt, temperature=0.0).result
    again = client.sample(tmp_path / "old", prompt=prompt, temperature=0.0).result
    assert new.prompt_cache_hit_tokens == 0
    assert new.sequences[0].logprobs.tolist() != old.sequences[0].logprobs.tolist()
    np.testing.assert_allclose(again.sequences[0].logprobs, old.sequences[0].logprobs, atol=1e-5)


def test_forgotten_snapshots_are_read_again(start, tmp_path):
    client = start(snapshot_bytes=1)
    for name in ("a", "b"):
        client.create(name, seed=ord(name))
        client.train(name)
        client.step(name, lr=0.2)
        client.save(tmp_path / name, name, for_sampling=True).wait()
    one = client.sample(tmp_path / "a", seed=1).result.sequences[0]
    client.sample(tmp_path / "b", seed=1).wait()
    two = client.sample(tmp_path / "a", seed=1).result.sequences[0]
    assert one.tokens.tolist() == two.tokens.tolist()


def test_describe_loads_no_weights(start, base):
    client = start()
    info = client.put(jobs.DescribeModelJob, base_model=base).result
    assert (info.arch, info.vocab_size, info.max_context_length) == ("llama", VOCAB, 256)
    assert info.eos_token_ids == (1,)
    assert not client.engine.compute.bases.loaded


BAD = {
    "no adapter": (lambda c: c.train("ghost"), "No adapter 'ghost' is loaded"),
    "no adapter to step": (lambda c: c.step("ghost"), "No adapter 'ghost' is loaded"),
    "unknown loss": (lambda c: c.train(loss_fn="nonsense"), "nonsense"),
    "rank 0": (lambda c: c.create("z", rank=0), "rank"),
    "token out of range": (lambda c: c.train(data=(weighted([1.0], token=VOCAB),)), str(VOCAB)),
    "nan weight": (
        lambda c: c.train(data=(weighted([1.0, math.nan]),)),
        "data[0].loss_fn_inputs.weights",
    ),
    "wrong shape": (
        lambda c: c.train(data=(weighted([1.0, 1.0], length=3),)),
        "data[0].loss_fn_inputs.weights",
    ),
    "context overflow": (lambda c: c.train(data=(random_datum(300),)), "256"),
    "no folder": (lambda c: c.sample(Path("/nowhere/at/all")), "all is no checkpoint"),
    "sample token": (lambda c: c.sample(prompt=np.array([VOCAB])), "outside the vocabulary"),
    "kv too small": (lambda c: c.sample(max_tokens=200), "KV memory"),
    "no such model": (
        lambda c: c.put(jobs.DescribeModelJob, base_model="/no/such/model"),
        "/no/such/model",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_users_mistake_is_told_and_the_next_call_works(start, name):
    client = start(sampler=SamplerConfig(kv_bytes=64 * 2 * 2 * 2 * 8 * 4))
    client.create()
    bad, message = BAD[name]
    failed = bad(client).wait()
    assert isinstance(failed, jobs.Failed)
    assert failed.category == "user", failed
    assert message in failed.message
    assert client.train().result.num_tokens == 12
    assert client.step().result.metrics["grad_norm:mean"] > 0
    assert client.sample().result.num_sampled_tokens == 8


def test_cancel_ends_a_running_sample_and_a_waiting_job(start):
    client = start(trainer=TrainerConfig(max_tokens=64))
    client.create().wait()
    with client.held_up():
        long = client.train(data=tuple(random_datum(60, i) for i in range(250)))
        waiting = client.step()
        stream = client.sample(max_tokens=250, stream=True)
        client.engine.cancel(waiting.job.job_id)
    until(lambda: stream.events)
    client.engine.cancel(stream.job.job_id)
    assert waiting.wait().category == "cancelled"
    assert stream.wait().category == "cancelled"
    assert long.result.num_tokens == 15_000
    client.engine.cancel("never heard of")
    assert client.step().result.metrics["step:max"] == 1


def test_close_ends_every_job_and_later_ones_at_once(start):
    client = start(trainer=TrainerConfig(max_tokens=64))
    client.create().wait()
    tickets = [client.train(data=tuple(random_datum(60, i) for i in range(2000)))]
    tickets += [client.step(), client.sample(max_tokens=200)]
    time.sleep(0.1)
    client.engine.close()
    assert {ticket.wait().category for ticket in tickets} == {"cancelled"}
    assert client.step().wait().category == "cancelled"


def test_a_receiver_that_fails_does_not_take_the_engine_with_it(start, caplog):
    client = start()

    def broken(event: jobs.Event) -> None:
        raise RuntimeError("no one listens")

    client.engine.submit(jobs.DescribeModelJob(job_id="x", base_model=client.base), broken)
    assert client.sample().result.num_sampled_tokens == 8
    assert "no one listens" in caplog.text


def test_impossible_shares_are_refused():
    with pytest.raises(ConfigError, match="train_share"):
        EngineConfig(train_share=1.0)


def test_a_device_that_is_not_supported_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match="Use 'cpu'"):
        EngineConfig(device="mps").torch_device()


def test_weights_kept_for_sampling_are_sized_by_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = snapshot_room(CPU)
    assert 256 << 20 <= room <= 2 << 30
    assert room <= max(total // 32, 256 << 20)

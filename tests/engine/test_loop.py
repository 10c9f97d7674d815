"""The loop of an engine: order in a lane, cancelling, failures, saves, fairness and the end.

Every test runs with both computes, torch and the toy, and sees only jobs and their events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from datums import train_datum
from engine_world import ENDS, VOCAB, Ticket, World, random_datum

from tinkex.contract.optimizers import AdamParams
from tinkex.engine import folders, jobs
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.torch.config import EngineConfig
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.engine import toy_engine


def start_torch(**config: Any) -> jobs.Engine:
    sampler = SamplerConfig(max_running=2)
    return TorchEngine(EngineConfig(device="cpu", sampler=sampler, **config))


def start_toy(**config: Any) -> jobs.Engine:
    return toy_engine(ToyConfig(vocab_size=VOCAB, max_context_length=256, **config))


@pytest.fixture(params=[start_torch, start_toy], ids=["torch", "toy"])
def start(request, base) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def open_world(**config: Any) -> World:
        worlds.append(World(request.param(**config), base))
        return worlds[-1]

    yield open_world
    for world in worlds:
        world.engine.close()


def loss(ticket: Ticket) -> float:
    value: float = ticket.result.metrics["loss:sum"]
    return value


# ------------------------------------------------------------------------------------------ lanes


def test_jobs_of_an_adapter_run_in_the_order_they_came(start):
    world = start()
    world.create("a").wait()
    with world.held_up():
        tickets = [world.train("a"), world.step("a"), world.train("a"), world.step("a")]
        tickets += [world.train("a"), world.put(jobs.DropAdapterJob, adapter_id="a")]
        tickets.append(world.train("a"))
    assert isinstance(tickets[-1].wait(), jobs.Failed)
    assert world.ended[1:] == [ticket.job.job_id for ticket in tickets]
    losses = [loss(ticket) for ticket in tickets[:-1:2]]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 3


def test_a_lane_keeps_its_order_beside_others_and_waits_for_none(start):
    world = start(deterministic=True)
    for name in "ab":
        world.create(name).wait()
    with world.held_up():
        tickets = {name: [world.train(name), world.step(name), world.train(name)] for name in "ab"}
    for name in "ab":
        losses = [loss(ticket) for ticket in tickets[name][::2]]
        assert losses[0] > losses[1]
        ids = [ticket.job.job_id for ticket in tickets[name]]
        assert [job_id for job_id in world.ended if job_id in ids] == ids
    assert world.ended[-1] == tickets["b"][-1].job.job_id, "the last to come ends last"


def test_jobs_that_wait_together_give_what_they_give_alone(start):
    """They may share a pass; nothing of one shows in another."""
    world = start()
    for name in "abc":
        world.create(name).wait()
    alone = [
        loss(world.train(name, (random_datum(length, length),)))
        for name, length in zip("abc", (5, 9, 7), strict=True)
    ]
    with world.held_up():
        together = [
            world.train(name, (random_datum(n, n),))
            for name, n in zip("abc", (5, 9, 7), strict=True)
        ]
        steps = [world.step(name) for name in "abc"]
    assert [loss(ticket) for ticket in together] == pytest.approx(alone, rel=1e-4)
    assert all(ticket.result.metrics["grad_norm:mean"] > 0 for ticket in steps)


# ------------------------------------------------------------------------------ cancel and failure


def test_a_cancelled_job_ends_at_once_and_those_behind_it_run(start):
    world = start()
    world.create("a").wait()
    with world.held_up():
        first, second, third = world.train("a"), world.step("a"), world.train("a")
        sample, other = world.sample(), world.sample()
        for ticket in (second, sample):
            world.engine.cancel(ticket.job.job_id)
    assert second.wait().category == sample.wait().category == "cancelled"
    assert loss(first) == loss(third), "the step between them was not taken"
    assert other.result.num_sampled_tokens == 8


def test_cancelling_what_has_ended_or_never_was_changes_nothing(start):
    world = start()
    ticket = world.create("a")
    ticket.wait()
    world.engine.cancel(ticket.job.job_id)
    world.engine.cancel("nobody")
    assert loss(world.train("a")) > 0
    assert sum(isinstance(event, ENDS) for event in ticket.events) == 1


def test_a_job_that_fails_is_told_and_the_next_one_runs(start):
    world = start()
    world.create("a").wait()
    good = loss(world.train("a"))
    with world.held_up():
        wrong = world.train("a", data=(train_datum([1, 2, VOCAB + 5]),))
        next_one = world.train("a")
        stranger = world.train("nobody")
    assert wrong.wait().category == stranger.wait().category == "user"
    assert str(VOCAB + 5) in wrong.wait().message
    assert loss(next_one) == good


def test_a_sample_that_fails_is_told_and_the_next_one_runs(start, tmp_path):
    world = start()
    missing, sample = world.sample(tmp_path / "missing"), world.sample()
    assert missing.wait().category == "user"
    assert sample.result.num_sampled_tokens == 8


def test_a_receiver_that_fails_does_not_take_the_engine_with_it(start, caplog):
    world = start()
    world.create("a").wait()

    def emit(event: jobs.Event) -> None:
        raise RuntimeError("nobody listens")

    world.engine.submit(jobs.OptimJob(job_id="o", adapter_id="a", params=AdamParams()), emit)
    assert loss(world.train("a")) > 0
    assert "nobody listens" in caplog.text


# ------------------------------------------------------------------------------------------ saves


@pytest.fixture
def slow_disk(monkeypatch) -> threading.Event:
    """No folder is begun before the event is set."""
    gate, mkdtemp = threading.Event(), folders.tempfile.mkdtemp

    def wait_then_make(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(200)
        return mkdtemp(*args, **kwargs)

    monkeypatch.setattr(folders.tempfile, "mkdtemp", wait_then_make)
    return gate


def test_training_goes_on_beside_a_save_and_the_folder_holds_its_turn(start, tmp_path, slow_disk):
    world = start(deterministic=True)
    world.create("a").wait()
    world.train("a").wait()
    world.step("a").wait()
    save = world.save(tmp_path / "s", with_optimizer=True)
    saved_at = loss(world.train("a"))
    world.step("a").wait()
    later = loss(world.train("a"))
    assert not save.events
    slow_disk.set()
    assert save.result.size_bytes > 0
    assert isinstance(world.load(tmp_path / "s", "b").wait(), jobs.Done)
    assert loss(world.train("b")) == saved_at != later


def test_a_save_that_fails_is_told(start, tmp_path):
    world = start()
    world.create("a").wait()
    assert world.save(tmp_path / "s").result.size_bytes > 0
    again = world.save(tmp_path / "s")
    assert again.wait().category == "user"
    assert "never overwritten" in again.wait().message
    assert loss(world.train("a")) > 0


def test_unnamed_weights_do_not_wait_for_a_checkpoint_that_is_being_written(
    start, tmp_path, monkeypatch
):
    gate, mkdtemp = threading.Event(), folders.tempfile.mkdtemp

    def wait_for_named(*args: Any, **kwargs: Any) -> Any:
        assert "named" not in kwargs["prefix"] or gate.wait(200)
        return mkdtemp(*args, **kwargs)

    monkeypatch.setattr(folders.tempfile, "mkdtemp", wait_for_named)
    world = start()
    world.create("a").wait()
    named = world.save(tmp_path / "named", with_optimizer=True)
    quick = world.save(tmp_path / "quick", for_sampling=True, ephemeral=True)
    assert quick.result.size_bytes > 0
    assert world.sample(tmp_path / "quick").result.num_sampled_tokens == 8
    assert not named.events
    gate.set()
    assert named.result.size_bytes > 0


def test_a_second_save_is_copied_when_the_first_is_written(start, tmp_path, slow_disk):
    """Saves that come faster than the disk must not fill the memory with copies."""
    world = start()
    world.create("a").wait()
    saves = [world.save(tmp_path / name) for name in ("first", "second")]
    behind = world.train("a")
    assert not behind.ends_within(0.3)
    slow_disk.set()
    assert loss(behind) > 0
    assert all(save.result.size_bytes > 0 for save in saves)


def test_weights_saved_for_sampling_are_sampled_from_while_training_goes_on(start, tmp_path):
    world = start(deterministic=True)
    world.create("a").wait()
    for _ in range(3):
        world.train("a").wait()
        world.step("a").wait()
    world.save(tmp_path / "s", for_sampling=True, ephemeral=True).wait()
    first = world.sample(tmp_path / "s", seed=1).result.sequences[0]
    for _ in range(3):
        world.train("a").wait()
        world.step("a").wait()
    again = world.sample(tmp_path / "s", seed=1).result.sequences[0]
    assert first.tokens.tolist() == again.tokens.tolist()
    assert first.logprobs.tolist() == again.logprobs.tolist()


# --------------------------------------------------------------------------------------- samples


def test_tokens_are_streamed_before_the_result_and_are_the_result(start):
    ticket = start().sample(num_samples=2, stream=True)
    sequences = ticket.result.sequences
    for index, sequence in enumerate(sequences):
        told = [e for e in ticket.events if isinstance(e, jobs.Tokens) and e.sample_index == index]
        assert np.concatenate([event.tokens for event in told]).tolist() == sequence.tokens.tolist()


def test_a_model_is_described_and_loaded_before_anybody_waits_for_it(start):
    world = start()
    described = world.put(jobs.DescribeModelJob, base_model=world.base)
    loaded = world.put(jobs.LoadModelJob, base_model=world.base)
    assert described.result.vocab_size == VOCAB
    assert isinstance(loaded.result, jobs.AdapterResult)


# --------------------------------------------------------------------------------------- fairness


def test_a_tenant_with_few_samples_does_not_wait_for_one_with_many(start):
    world = start()
    world.sample().wait()
    with world.held_up():
        many = [world.sample(tenant="many", seed=i) for i in range(24)]
        few = world.sample(tenant="few")
    few.wait()
    for ticket in many:
        ticket.wait()
    before = world.ended[: world.ended.index(few.job.job_id)]
    assert len(before) <= 8, "it waited for another tenant's samples"


def test_training_goes_on_among_many_samples(start):
    world = start()
    world.create("a").wait()
    world.sample().wait()
    with world.held_up():
        samples = [world.sample(seed=i, max_tokens=20) for i in range(40)]
        train = world.train("a")
    train.wait()
    for ticket in samples:
        ticket.wait()
    before = world.ended[: world.ended.index(train.job.job_id)]
    assert len(before) < 40, "training waited for all samples"


# ------------------------------------------------------------------------------------------ close


def test_close_ends_every_job_and_those_that_come_later(start):
    world = start()
    world.create("a").wait()
    with world.held_up():
        tickets = [world.train("a"), world.step("a"), world.sample(), world.create("b")]
        closing = threading.Thread(target=world.engine.close)
        closing.start()
    closing.join(200)
    assert not closing.is_alive()
    later = world.sample()
    ends = [ticket.wait() for ticket in (*tickets, later)]
    assert all(isinstance(end, ENDS) for end in ends)
    assert later.wait().category == "cancelled"


def test_a_save_under_way_is_written_before_the_engine_closes(start, tmp_path, slow_disk):
    world = start()
    world.create("a").wait()
    save = world.save(tmp_path / "s")
    world.train("a").wait()  # the save's turn has come
    closing = threading.Thread(target=world.engine.close)
    closing.start()
    slow_disk.set()
    closing.join(200)
    assert isinstance(save.wait(), jobs.Done | jobs.Failed)
    assert (tmp_path / "s").is_dir()

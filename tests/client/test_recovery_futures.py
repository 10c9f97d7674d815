"""A client that outlives its run is a TrainingClient, and its futures are futures (R23, R17)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import inspect
import threading

import pytest
from patience import soon
from recovery_world import (
    ADAM,
    Server,
    batch,
    delete_run,
    new_client,
    quick,
    train,
    undisturbed,
    wait_until,
)

from tinkex.client.futures import APIFuture
from tinkex.client.service.service_client import ServiceClient
from tinkex.client.training.recovering_client import RecoveringTrainingClient
from tinkex.client.training.training_client import TrainingClient
from tinkex.errors import ClientClosedError, ConfigError, ResultTimeoutError, TinkerError


async def test_it_works_the_same_when_awaited(server):
    client = new_client(server).with_recovery(quick(server))
    losses = []
    for step in range(4):
        if step == 2:
            delete_run(server, client)
        future = await client.forward_backward_async(batch(step), "cross_entropy")
        await (await client.optim_step_async(ADAM))
        losses.append((await future).metrics["loss:sum"])
    assert losses == undisturbed(server, 4)
    client.close()


def test_after_close_every_call_fails_at_once(server):
    client = new_client(server).with_recovery(quick(server))
    client.forward(batch(0), "cross_entropy").result(60)
    client.close()
    for call in (
        lambda: client.forward(batch(0), "cross_entropy"),
        lambda: client.optim_step(ADAM),
        lambda: client.save_state("late"),
        lambda: client.get_info(),
    ):
        with pytest.raises(ClientClosedError):
            call()


class Held:
    """A server to connect to only once it is `open`: the run is lost, and stays so until then."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.open = threading.Event()

    def connect(self) -> ServiceClient:
        assert self.open.wait(60)
        return self._server.connect()


@contextlib.contextmanager
def held_back(server: Server, **options):
    """A client whose run was lost, and which waits for the block to end before it rebuilds it."""
    held = Held(server)
    client = new_client(server).with_recovery(quick(server, connect=held.connect, **options))
    delete_run(server, client)
    yield client
    held.open.set()


PUBLIC = [name for name in dir(TrainingClient) if not name.startswith("_")]
METHODS = [name for name in PUBLIC if callable(getattr(TrainingClient, name))]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_that_of_a_training_client(name):
    ours, theirs = getattr(RecoveringTrainingClient, name), getattr(TrainingClient, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours.__doc__ or not theirs.__doc__
    assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)


def test_no_method_goes_to_a_run_that_may_be_lost():
    """What is inherited is made of what is not: nothing else reads the run's own machinery."""
    machinery = {"_load", "_save_as", "pass_parts", "submit", "submit_json", "json_call"}
    inherited = [name for name in METHODS if name not in vars(RecoveringTrainingClient)]
    uses = {name: set(getattr(TrainingClient, name).__code__.co_names) for name in inherited}
    assert {name: used & machinery for name, used in uses.items() if used & machinery} == {}
    spawning = {"spawn", "whole_step", "skipped_step"}
    assert {name for name, used in uses.items() if used & spawning} == {
        "get_tokenizer",
        "log_metrics",  # a number for a picture: it goes to the run of the moment, or fails alone
        "train_step",
    }


def test_a_future_is_a_future(server):
    """It ends by itself, whoever asks: no thread waits for it here."""
    client = new_client(server).with_recovery(quick(server))
    assert isinstance(client, TrainingClient)
    delete_run(server, client)
    futures = [client.forward(batch(n), "cross_entropy") for n in range(3)]
    futures.append(client.train_step(batch(3), "cross_entropy", ADAM))
    assert {type(future) for future in futures} == {APIFuture}
    done = concurrent.futures.as_completed(futures, timeout=60)
    assert {future.status().state for future in done} == {"done"}
    assert all(future.exception() is None for future in futures)
    assert client.num_recoveries == 1
    client.close()


def test_a_wait_says_that_the_run_is_rebuilt(server):
    with held_back(server) as client:
        halves = [client.forward(batch(1), "cross_entropy")]
        halves.append(client.train_step(batch(1), "cross_entropy", ADAM))
        wait_until(lambda: "attempt 1 to rebuild it" in str(halves[0].status()))
        assert halves[0].status().state in ("submitted", "queued", "running")
        assert halves[0].status().waited_s > 0
        assert "attempt 1 to rebuild it" in str(halves[1].status())
        late = client.forward(batch(1), "cross_entropy")
        with pytest.raises(ResultTimeoutError, match=r"attempt 1 to rebuild it.*call result\(\)"):
            late.result(0.05)
    assert late.result(60).metrics["loss:sum"] < halves[0].result(60).metrics["loss:sum"]
    assert halves[1].status().state == "done"
    client.close()


def test_a_cancelled_call_still_counts(server):
    """Cancelling ends the wait. The step was submitted, and later ones build on it."""
    expected = undisturbed(server, 4)
    with held_back(server) as client:
        first = client.train_step(batch(0), "cross_entropy", ADAM)
        gradient = client.forward_backward(batch(1), "cross_entropy")
        step = client.optim_step(ADAM)
        assert gradient.cancel()
        assert step.cancel()
    assert step.status().state == "cancelled"
    with pytest.raises(concurrent.futures.CancelledError):
        step.result(60)
    assert [first.result(60).loss, *train(client, range(2, 4))] == expected[:1] + expected[2:]
    assert not step.cancel()
    client.close()


async def test_an_awaited_future_gives_up_in_time(server):
    client = await asyncio.to_thread(new_client, server)
    client = await asyncio.to_thread(client.with_recovery, quick(server))
    future = await client.forward_async(batch(0), "cross_entropy")
    assert (await asyncio.wait_for(future, 60)) is await future.result_async(60)
    server.latency_s = 5.0
    await asyncio.to_thread(server.restart)
    slow = await client.forward_async(batch(0), "cross_entropy")
    with pytest.raises(ResultTimeoutError, match="No result within"):
        await slow.result_async(0.1)
    assert slow.cancelled()
    server.latency_s = 0.0
    await asyncio.to_thread(server.restart)
    client.close()


def test_a_callback_may_make_calls_but_not_wait(server):
    """It runs on the SDK's own threads, also while a run is rebuilt."""
    made, refused = [], []

    def go_on(done) -> None:
        made.append(client.forward(batch(1), "cross_entropy"))
        try:
            made[-1].result()
        except TinkerError as exc:
            refused.append(str(exc))

    with held_back(server, on_lost=go_on) as client:
        client.forward(batch(0), "cross_entropy").add_done_callback(go_on)
        wait_until(lambda: made)
    wait_until(lambda: len(made) == 2)
    assert made[0].result(60).metrics == made[1].result(60).metrics
    wait_until(lambda: len(refused) == 2)
    assert all("called in a callback" in text for text in refused)
    client.close()


async def test_calls_made_while_the_run_is_rebuilt_return_at_once_and_in_order(server):
    """R11: from coroutines too, none of which is held up."""
    wanted = ["forward_backward", "optim_step", "forward", "forward_backward", "optim_step"] * 4
    plain = await asyncio.to_thread(new_client, server)
    path = (await (await plain.save_state_async("start"))).path
    held = Held(server)
    policy = quick(server, save_every_steps=0, checkpoint=path, connect=held.connect)
    client = plain.with_recovery(policy)
    await asyncio.to_thread(delete_run, server, client)
    futures = []
    for step, name in enumerate(wanted):
        args = (ADAM,) if name == "optim_step" else (batch(step), "cross_entropy")
        futures.append(await getattr(client, f"{name}_async")(*args))
    assert client.num_recoveries == 0
    held.open.set()
    await asyncio.gather(*futures)
    assert [call.method for call in client._log.calls] == wanted
    assert client.num_recoveries == 1
    client.close()


async def test_a_custom_loss_awaited_while_the_run_is_rebuilt_is_repeated_too(server):
    """It waits for its forward pass, which outlives the run, and begins again on the new one."""

    def loss(data, logprobs):
        return sum(one.square().sum() for one in logprobs), {}

    plain = await asyncio.to_thread(new_client, server)
    expected = await (await plain.forward_backward_custom_async(batch(0), loss))
    with held_back(server) as client:
        coming = asyncio.ensure_future(client.forward_backward_custom_async(batch(0), loss))
        await soon(lambda: client._unanswered)
    assert (await (await coming)).metrics == expected.metrics
    assert client.num_recoveries == 1
    client.close()


def test_a_copy_is_a_second_hand_on_the_same_run(server):
    client = new_client(server).with_recovery(quick(server))
    other = copy.copy(client)
    delete_run(server, client)
    train(client, range(1))
    assert other.model_id == client.model_id == client.run_ids[1]
    client.close()


async def test_the_queue_of_every_run_is_heard(server):
    """R18: whoever listened to the first run, or listens to the recovering client, still does."""
    plain = await asyncio.to_thread(new_client, server)
    client = await asyncio.to_thread(plain.with_recovery, quick(server))
    heard = []
    plain.on_queue_state_change = lambda state, reason: heard.append(("plain", reason))
    client.client._calls.watch.saw("r", "paused_capacity", "first")
    client.on_queue_state_change = lambda state, reason: heard.append(("ours", reason))
    await asyncio.to_thread(delete_run, server, client)
    await asyncio.to_thread(train, client, range(1))
    client.client._calls.watch.saw("r", "paused_capacity", "second")
    assert heard == [("plain", "first"), ("ours", "second")]
    client.close()


def test_a_client_of_the_users_own_keeps_its_methods(server):
    counted = []

    class Counting(TrainingClient):
        def forward(self, *args, **kwargs):
            counted.append(args)
            return super().forward(*args, **kwargs)

    plain = new_client(server)
    own = Counting(plain.holder, plain.model_seq_id, plain.model_id)
    client = own.with_recovery(quick(server))
    client.forward(batch(0), "cross_entropy").result(60)
    assert len(counted) == 1
    client.close()


def test_one_policy_per_run(server):
    client = new_client(server).with_recovery(quick(server))
    with pytest.raises(ConfigError, match=r"client\.client\.with_recovery"):
        client.with_recovery(quick(server))
    client.close()
    other = client.client.with_recovery(quick(server))
    train(other, range(1))
    delete_run(server, other)
    train(other, range(1))
    assert (client.num_recoveries, other.num_recoveries) == (0, 1)
    other.close()

"""Training goes on after its run was lost (R23), against real servers on the toy engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tinkex.client import events, local
from tinkex.client.config import ClientConfig
from tinkex.client.futures import APIFuture
from tinkex.client.recovery import RecoveryPolicy
from tinkex.client.run_monitor import RunMonitor
from tinkex.client.service_client import ServiceClient
from tinkex.client.training_client import TrainingClient
from tinkex.errors import (
    BadRequestError,
    ConfigError,
    InvalidInputError,
    RecoveryFailedError,
    RequestFailedError,
    TinkerError,
)
from tinkex.types import AdamParams, Datum, ModelInput

ADAM = AdamParams(learning_rate=0.05)


class Server:
    """A server process on a data directory; killed without warning, started again elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._services: list[ServiceClient] = []
        self.latency_s = 0.0
        self.base_url = ""

    def start(self, port: int = 0) -> None:
        command = [sys.executable, "-m", "tinkex.server", "--engine", "toy", "--port", str(port)]
        command += ["--toy-latency", str(self.latency_s)]
        env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
        log = (self._folder / "server.log").open("ab")
        self._child = subprocess.Popen(
            [*command, "--data-dir", str(self._folder)], stdout=subprocess.PIPE, stderr=log, env=env
        )
        log.close()
        assert self._child.stdout is not None
        self.base_url = json.loads(self._child.stdout.readline())["base_url"]

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def kill(self) -> None:
        if not self.is_running:
            return
        assert self._child is not None
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(30)
        assert self._child.stdout is not None
        self._child.stdout.close()

    def connect(self) -> ServiceClient:
        config = ClientConfig.from_env(
            base_url=self.base_url,
            env={},
            retry_window_s=0.5,
            max_retries=1,
            connect_timeout_s=1.0,
            timeout_s=10.0,
        )
        self._services.append(ServiceClient(config=config))
        return self._services[-1]

    def disconnect(self) -> None:
        """Close every client, so that none goes on calling a server that is gone."""
        for service in self._services:
            service.close()
        self._services.clear()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def server(shared_server):
    """A running server; a test may kill it and need not start it again."""
    if not shared_server.is_running:
        shared_server.start()
    yield shared_server
    shared_server.disconnect()


def batch(step: int) -> list[Datum]:
    tokens = [(step * 7 + i) % 50 for i in range(12)]
    return [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": [1.0] * 12})]


def quick(server: Server, **options) -> RecoveryPolicy:
    defaults = {
        "save_every_steps": 3,
        "initial_delay_s": 0.1,
        "max_delay_s": 0.5,
        "attempt_timeout_s": 10.0,
        "monitor_interval_s": 0.0,
        "unreachable_s": 1.0,
        "connect": server.connect,
    }
    return RecoveryPolicy(**{**defaults, **options})


def train(client, steps, *, disturb=lambda step: None) -> list[float]:
    losses = []
    for step in steps:
        disturb(step)
        losses.append(client.train_step(batch(step), "cross_entropy", ADAM).result(60).loss)
    return losses


def new_client(server: Server) -> TrainingClient:
    service = server.connect()
    base = service.get_server_capabilities().supported_models[0].model_name
    return service.create_lora_training_client(base, rank=4, seed=1)


def undisturbed(server: Server, num_steps: int) -> list[float]:
    return train(new_client(server), range(num_steps))


def delete_run(server: Server, client) -> None:
    """Unload the model from under its client."""
    other = server.connect()
    stranger = TrainingClient(other.holder, 0, client.client.model_id)

    def gone() -> bool:
        try:
            stranger.unload_model().result(30)
        except BadRequestError as exc:  # a checkpoint is still being saved
            return "under way" not in str(exc)
        return True

    wait_until(gone)
    other.close().result(10)


def test_the_run_deleted_under_the_client_goes_on_exactly(server):
    """R23: from the latest checkpoint, with the optimizer, and nothing is lost."""
    expected = undisturbed(server, 8)
    told = []
    client = new_client(server).with_recovery(quick(server, on_recovered=told.append))
    losses = train(client, range(8), disturb=lambda step: step == 5 and delete_run(server, client))
    assert losses == expected
    assert client.num_recoveries == 1
    assert told[0].run_id == client.run_ids[0]
    assert told[0].new_run_id == client.run_ids[1] == client.model_id
    assert told[0].checkpoint.endswith("/weights/recovery-000003")
    client.close()


def test_a_server_killed_for_good_is_replaced_by_a_new_one_on_its_data(server):
    """R23: another process, another port, the same data directory."""
    expected = undisturbed(server, 8)
    client = new_client(server).with_recovery(quick(server))

    def replace(step: int) -> None:
        if step == 4:
            server.kill()
            server.start()

    assert train(client, range(8), disturb=replace) == expected
    assert client.num_recoveries == 1
    client.close()


def test_five_losses_in_one_run(server):
    """R23: deletions and kills by turns; the loop never hears of them."""
    expected = undisturbed(server, 14)
    client = new_client(server).with_recovery(quick(server))

    def disturb(step: int) -> None:
        if step in (3, 8, 12):
            delete_run(server, client)
        elif step in (5, 10):
            server.kill()
            server.start()

    assert train(client, range(14), disturb=disturb) == expected
    assert client.num_recoveries == 5
    assert len(set(client.run_ids)) == 6
    client.close()


def test_it_survives_downtime_longer_than_one_attempt(server):
    """R23: attempts fail while nobody answers; the loop goes on when someone does."""
    expected = undisturbed(server, 5)
    attempts = []
    end = events.subscribe(lambda e: attempts.append(e) if e.name.startswith("recovery") else None)
    client = new_client(server).with_recovery(quick(server, max_attempts=30))

    def down_for_a_while(step: int) -> None:
        if step == 3:
            server.kill()
            threading.Timer(3.0, server.start).start()

    assert train(client, range(5), disturb=down_for_a_while) == expected
    end()
    stop = next(e for e in attempts if e.name == "recovery.stop")
    assert stop.fields["attempt"] > 2
    client.close()


def test_calls_in_the_pipeline_are_answered_from_the_new_run(server):
    """Nothing was awaited when the run was lost: gradients gathered so far are gathered again."""
    plain = new_client(server)
    plain.forward_backward(batch(0), "cross_entropy").result()
    plain.forward_backward(batch(1), "cross_entropy").result()
    plain.optim_step(ADAM).result()
    expected = plain.forward(batch(2), "cross_entropy").result().metrics["loss:sum"]

    client = new_client(server).with_recovery(quick(server))
    first = client.forward_backward(batch(0), "cross_entropy")
    assert first.result().metrics["loss:sum"] > 0
    delete_run(server, client)
    second = client.forward_backward(batch(1), "cross_entropy")
    step = client.optim_step(ADAM)
    after = client.forward(batch(2), "cross_entropy")
    assert after.result(60).metrics["loss:sum"] == expected
    assert second.result(5) is not None
    assert step.result(5) is not None
    assert client.num_recoveries == 1
    client.close()


def test_a_server_that_dies_while_results_are_awaited_is_noticed(server):
    """The promise was given; nobody will ever keep it."""
    expected = undisturbed(server, 4)
    server.kill()
    server.latency_s = 1.0
    server.start()
    client = new_client(server).with_recovery(quick(server))
    first = client.train_step(batch(0), "cross_entropy", ADAM)
    time.sleep(0.3)
    server.kill()
    server.latency_s = 0.0
    server.start()
    assert [first.result(60).loss, *train(client, range(1, 4))] == expected
    assert client.num_recoveries == 1
    client.close()


def test_a_server_killed_while_the_run_is_rebuilt_is_not_waited_for(server):
    """The promise to load the checkpoint was given; its server will never keep it."""
    expected = undisturbed(server, 4)
    client = new_client(server).with_recovery(quick(server))
    losses = train(client, range(2))
    delete_run(server, client)
    server.kill()
    server.latency_s = 2.0
    server.start()
    promised = threading.Event()

    def note(event) -> None:
        if (event.name, event.fields.get("path")) == ("http.request.stop", "load_weights"):
            promised.set()

    def replace() -> None:
        assert promised.wait(60)
        server.kill()
        server.latency_s = 0.0
        server.start()

    end = events.subscribe(note)
    chaos = threading.Thread(target=replace)
    chaos.start()
    assert losses + train(client, range(2, 4)) == expected
    chaos.join()
    end()
    assert client.num_recoveries == 1
    client.close()


def test_a_run_lost_and_then_its_server_is_still_a_loss(server):
    """Nobody is there to tell a lost run from a mistake of the caller's: ask the next server."""
    expected = undisturbed(server, 4)
    client = new_client(server).with_recovery(quick(server))
    losses = train(client, range(2))
    delete_run(server, client)
    check = client._monitor.check

    def check_too_late(run):
        client._monitor.check = check
        server.kill()
        threading.Timer(0.5, server.start).start()
        return check(run)

    client._monitor.check = check_too_late
    assert losses + train(client, range(2, 4)) == expected
    assert client.num_recoveries == 1
    client.close()


def test_a_custom_loss_does_not_wait_for_a_server_that_died(server):
    """Such a call waits for a forward pass before it returns; so does its repetition."""
    import torch

    def loss(data, logprobs):
        return torch.cat(logprobs).square().sum(), {}

    plain = new_client(server)
    expected = plain.forward_backward_custom(batch(0), loss).result().metrics["loss:sum"]
    server.kill()
    server.latency_s = 1.5
    server.start()
    client = new_client(server).with_recovery(quick(server))

    def replace() -> None:
        server.kill()
        server.latency_s = 0.0
        server.start()

    timer = threading.Timer(0.5, replace)
    timer.start()
    assert client.forward_backward_custom(batch(0), loss).result(60).metrics["loss:sum"] == expected
    timer.join()
    assert client.num_recoveries == 1
    client.close()


def test_a_call_that_never_arrived_is_a_loss_for_those_after_it(server):
    """The server is back and knows the run, but waits for a number that will never come."""
    expected = undisturbed(server, 4)
    client = new_client(server).with_recovery(quick(server))
    losses = train(client, range(2))
    port = int(server.base_url.rpartition(":")[2])
    server.kill()
    client.forward_backward(batch(2), "cross_entropy")  # given up, and never awaited
    wait_until(lambda: client._log.calls[-1].made[0].done())
    server.start(port)
    client.optim_step(ADAM)
    losses += train(client, range(3, 4))
    assert losses == expected[:2] + expected[3:]
    assert client.num_recoveries == 1
    client.close()


def test_a_step_with_a_wrong_half_leaves_nothing_behind(server):
    expected = undisturbed(server, 2)
    client = new_client(server).with_recovery(quick(server))
    losses = train(client, range(1))
    with pytest.raises(InvalidInputError):
        client.train_step(batch(7), "cross_entropy", AdamParams(learning_rate=-1.0))
    assert losses + train(client, range(1, 2)) == expected
    client.close()


def lose_the_answer(client, future) -> None:
    """As if the last call's answer had got lost on its way."""
    future.result(30)
    call = client._log.calls[-1]
    call.is_answered, call.made = False, (APIFuture(), call.made[1])
    client._log._done.clear()


def test_a_call_is_never_answered_from_a_later_state(server):
    """Checkpoints after a call whose answer never came cannot give that answer."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=1))
    train(client, range(1))
    expected = client.forward(batch(9), "cross_entropy").result(30).metrics["loss:sum"]
    asked = client.forward(batch(9), "cross_entropy")
    lose_the_answer(client, asked)
    train(client, range(1, 4))
    delete_run(server, client)
    train(client, range(4, 5))
    assert asked.result(60).metrics["loss:sum"] == expected
    client.close()


def test_a_name_being_saved_again_is_not_trusted(server):
    """It may hold the state before or after; repeating calls on the wrong one would be silent."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=0))
    train(client, range(1))
    client.save_state("last").result(30)
    train(client, range(1, 2))
    lose_the_answer(client, client.save_state("last", overwrite=True))
    delete_run(server, client)
    with pytest.raises(
        RecoveryFailedError, match=r"/last was being saved again.*a name of its own"
    ):
        client.forward(batch(0), "cross_entropy").result(60)
    client.close()


def test_a_checkpoint_that_is_gone_is_passed_over(server):
    """The one before it serves, and the calls since then are still known."""
    expected = undisturbed(server, 6)
    told = []
    client = new_client(server).with_recovery(
        quick(server, save_every_steps=2, on_recovered=told.append)
    )
    losses = train(client, range(5))
    newest = f"tinker://{client.model_id}/weights/recovery-000004"
    wait_until(lambda: client._take_saves() or client._log.saved[-1].path == newest)
    rest = server.connect().create_rest_client()
    rest.delete_checkpoint_from_tinker_path(newest).result(30)
    delete_run(server, client)
    assert losses + train(client, range(5, 6)) == expected
    assert told[0].checkpoint.endswith("/weights/recovery-000002")
    assert told[0].num_forgotten == 0
    client.close()


def test_a_mistake_that_was_told_is_not_remembered(server):
    """A call that failed for good must not keep every later call and checkpoint alive."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=1))
    wrong = [Datum(ModelInput.from_ints([10**8]), {"target_tokens": [1], "weights": [1.0]})]
    with pytest.raises((RequestFailedError, InvalidInputError, ValueError)):
        client.forward_backward(wrong, "cross_entropy").result(30)
    train(client, range(6))
    wait_until(lambda: client._take_saves() or len(client._log.calls) <= 6)
    client.close()


def test_the_first_session_ends_with_its_server(server):
    """Nobody sends heartbeats, or a goodbye, to a server that is gone for good."""
    first = new_client(server)
    client = first.with_recovery(quick(server))
    server.kill()
    server.start()
    train(client, range(1))
    wait_until(lambda: first.holder._session_is_over)
    client.close()


def test_the_first_session_lives_on_while_its_server_knows_it(server):
    """Only the run was lost: other clients of the session still need its heartbeats."""
    first = new_client(server)
    beats = []
    end = events.subscribe(lambda e: beats.append(e) if e.name == "session.heartbeat" else None)
    client = first.with_recovery(quick(server))
    delete_run(server, client)
    train(client, range(1))
    wait_until(lambda: any(e.fields["session_id"] == first.holder.session_id for e in beats))
    assert not first.holder._session_is_over
    end()
    client.close()


def pipelined(client) -> list[float]:
    """Four steps under way at any time, some of them with a look at the state between the two
    halves; each is awaited on a thread of its own, and optimizer steps never are."""

    def loss(future) -> float:
        return future.result(120).metrics["loss:sum"]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        losses = []
        for step in range(14):
            waiting = [client.forward_backward(batch(step), "cross_entropy")]
            client.optim_step(ADAM)
            if step % 3 == 0:
                waiting.append(client.forward(batch(99), "cross_entropy"))
            losses += [threads.submit(loss, future) for future in waiting]
            if len(losses) > 4:
                losses[-5].result()
        return [future.result() for future in losses]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_losses_at_random_moments_leave_no_trace(server, seed):
    """R23: deletions and kills while calls are under way; every result is exactly as without."""
    server.kill()
    server.latency_s = 0.03
    server.start()
    expected = pipelined(new_client(server))
    rng = random.Random(seed)
    every = rng.choice((1, 2, 3, 5))
    client = new_client(server).with_recovery(
        quick(server, max_attempts=30, save_every_steps=every)
    )

    def disturb() -> None:
        for _ in range(rng.randint(1, 3)):
            time.sleep(rng.random() * 0.6)
            if rng.random() < 0.5:
                with contextlib.suppress(TinkerError):  # busy, or gone already
                    run = TrainingClient(server.connect().holder, 0, client.client.model_id)
                    run.unload_model().result(5)
            else:
                server.kill()
                time.sleep(rng.random() * 0.5)
                server.start()

    chaos = threading.Thread(target=disturb)
    chaos.start()
    try:
        assert pipelined(client) == expected
    finally:  # or the next test would find two hands on the server
        chaos.join()
        client.close()
        server.latency_s = 0.0


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


async def test_calls_from_coroutines_keep_the_order_in_which_they_were_made(server):
    """R11: also when they had to wait, here for the lock that a rebuild holds."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=0))
    wanted = ["forward_backward", "optim_step", "forward", "forward_backward", "optim_step"] * 4
    calls = []
    with client._lock:
        for step, name in enumerate(wanted):
            args = (ADAM,) if name == "optim_step" else (batch(step), "cross_entropy")
            calls.append(asyncio.ensure_future(getattr(client, f"{name}_async")(*args)))
        await asyncio.sleep(0.1)
    await asyncio.gather(*[await call for call in calls])
    assert [call.method for call in client._log.calls] == wanted
    client.close()


def test_a_custom_loss_survives_too(server):
    import torch

    def loss(data, logprobs):
        return torch.cat(logprobs).square().sum(), {}

    def run(client, disturb=lambda: None):
        for step in range(3):
            if step == 2:
                disturb()
            out = client.forward_backward_custom(batch(step), loss)
            client.optim_step(ADAM).result(60)
        return out.result(60).metrics["loss:sum"]

    client = new_client(server).with_recovery(quick(server))
    assert run(client, lambda: delete_run(server, client)) == run(new_client(server))
    assert client.num_recoveries == 1
    client.close()


def test_a_named_checkpoint_is_taken_when_asked_for(server):
    plain = new_client(server)
    train(plain, range(2))
    path = plain.save_state("good").result().path
    expected = plain.forward(batch(9), "cross_entropy").result().metrics["loss:sum"]
    train(plain, range(2, 5))
    client = plain.with_recovery(quick(server, checkpoint=path, save_every_steps=0))
    delete_run(server, client)
    assert client.forward(batch(9), "cross_entropy").result(60).metrics["loss:sum"] == expected
    client.close()


def test_the_best_checkpoint_is_the_one_with_the_best_metric(server):
    """R23: best = a metric the user names, kept with each checkpoint."""
    client = new_client(server).with_recovery(
        quick(server, checkpoint="best", metric="score", metric_mode="max", save_every_steps=0)
    )
    wanted = None
    for step, score in enumerate([1.0, 7.0, 3.0]):
        train(client, [step])
        saved = client.save_state(f"s{step}", user_metadata={"score": str(score)}).result()
        if score == 7.0:
            wanted = saved.path
    told = []
    object.__setattr__(client, "policy", quick(
        server, checkpoint="best", metric="score", metric_mode="max", save_every_steps=0,
        on_recovered=told.append,
    ))  # fmt: skip
    delete_run(server, client)
    client.forward(batch(0), "cross_entropy").result(60)
    assert told[0].checkpoint == wanted
    client.close()


def test_without_a_checkpoint_of_its_own_it_finds_those_of_the_server(server):
    plain = new_client(server)
    train(plain, range(2))
    plain.save_state("older").result()
    path = plain.save_state("newer").result().path
    told = []
    client = plain.with_recovery(quick(server, save_every_steps=0, on_recovered=told.append))
    delete_run(server, client)
    client.forward(batch(0), "cross_entropy").result(60)
    assert told[0].checkpoint == path
    client.close()


def test_the_monitor_notices_before_anyone_asks(server):
    """R23: a wait that would never end is ended by the watch, and the new run is watched too."""
    client = new_client(server).with_recovery(quick(server, monitor_interval_s=0.1))
    train(client, range(1))
    for _ in range(2):
        delete_run(server, client)
        wait_until(lambda: client._lost is not None)
        train(client, range(1))
    assert client.num_recoveries == 2
    client.close()


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_embedded_server_that_is_not_started_again_is_replaced(server, tmp_path, monkeypatch):
    """R23 without any server named: it is brought back, and given up only when it keeps dying."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_LOCAL_ENGINE", "toy")
    config = ClientConfig.from_env(base_url="local", retry_window_s=0.5, max_retries=1)
    with ServiceClient(config=config) as service:
        base = service.get_server_capabilities().supported_models[0].model_name
        policy = RecoveryPolicy(save_every_steps=1, monitor_interval_s=0, initial_delay_s=0.1)
        client = service.create_lora_training_client(base, rank=4, seed=1).with_recovery(policy)
        before = train(client, range(2))
        kill_embedded(tmp_path)
        before += train(client, range(2, 4))
        assert client.num_recoveries == 0  # the client brought it back, where it was
        monkeypatch.setattr(local, "MAX_RESTARTS", 1)
        kill_embedded(tmp_path)
        before += train(client, range(4, 6))
        assert client.num_recoveries == 1
        client.close()
    assert before == undisturbed(server, 6)
    kill_embedded(tmp_path)


def kill_embedded(home: Path) -> None:
    (record,) = home.glob("*.json")
    pid = json.loads(record.read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    for child in local._children:
        if child.pid == pid:
            child.wait(10)


def test_a_monitor_tells_ok_lost_and_unreachable_apart(server):
    run = new_client(server)
    monitor = RunMonitor(timeout_s=5.0)
    assert monitor.check(run).state == "ok"
    run.unload_model().result(30)
    lost = monitor.check(run)
    assert (lost.state, "unloaded" in lost.reason) == ("lost", True)
    server.kill()
    assert monitor.check(run).state == "unreachable"


def test_a_mistake_of_the_caller_is_no_loss(server):
    client = new_client(server).with_recovery(quick(server))
    tokens = [10**8]
    wrong = [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": [1.0]})]
    with pytest.raises((RequestFailedError, InvalidInputError, ValueError)):
        client.forward_backward(wrong, "cross_entropy").result(30)
    assert client.num_recoveries == 0
    train(client, range(1))
    client.close()


def test_it_gives_up_after_its_attempts_and_says_why(server):
    told = []
    client = new_client(server).with_recovery(
        quick(server, max_attempts=2, on_lost=told.append, on_failed=told.append)
    )
    train(client, range(1))
    server.kill()
    with pytest.raises(RecoveryFailedError, match="could not be rebuilt") as caught:
        train(client, range(1))
    assert len(told) == 2
    assert caught.value.__cause__ is not None
    client._monitor.stop()


def test_a_connect_that_fails_is_a_failed_attempt(server):
    """Whatever finds the server may not find it yet."""
    answers = [OSError("no such host"), KeyError("address")]

    def connect() -> ServiceClient:
        if answers:
            raise answers.pop()
        return server.connect()

    client = new_client(server).with_recovery(quick(server, connect=connect))
    delete_run(server, client)
    assert len(train(client, range(1))) == 1
    assert (client.num_recoveries, answers) == (1, [])
    client.close()


def test_a_copy_is_a_second_hand_on_the_same_run(server):
    client = new_client(server).with_recovery(quick(server))
    assert copy.copy(client).model_id == client.model_id
    client.close()


def test_without_any_checkpoint_it_says_what_to_do(server):
    client = new_client(server).with_recovery(quick(server, save_every_steps=0))
    delete_run(server, client)
    with pytest.raises(RecoveryFailedError, match="set save_every_steps, or call save_state"):
        client.forward(batch(0), "cross_entropy").result(60)
    client.close()


def test_old_checkpoints_of_its_own_are_deleted(server):
    client = new_client(server).with_recovery(quick(server, save_every_steps=1, keep=2))
    train(client, range(6))
    rest = server.connect().create_rest_client()

    def names():
        client.forward(batch(0), "cross_entropy").result(30)  # finished saves are counted by calls
        found = rest.list_checkpoints(client.model_id).result().checkpoints
        return sorted(one.checkpoint_id for one in found)

    wait_until(lambda: len(names()) <= 3 and names()[-1] == "weights/recovery-000006")
    client.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"checkpoint": "newest"}, "checkpoint"),
        ({"metric_mode": "up"}, "metric_mode"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"keep": 0}, "keep"),
        ({"save_every_steps": -1}, "save_every_steps"),
        ({"initial_delay_s": 5.0, "max_delay_s": 1.0}, "max_delay_s"),
        ({"attempt_timeout_s": 0.0}, "attempt_timeout_s"),
        ({"unreachable_s": 0.0}, "unreachable_s"),
    ],
)
def test_a_bad_policy_is_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        RecoveryPolicy(**options)


def test_delays_double_up_to_the_cap():
    policy = RecoveryPolicy(initial_delay_s=1.0, max_delay_s=5.0)
    assert [policy.delay_s(n) for n in range(1, 7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert policy.delay_s(2, jitter=1.0) == 1.25

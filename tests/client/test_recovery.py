"""Training goes on after its run was lost (R23), against real servers on the toy engine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from recovery_world import (
    ADAM,
    batch,
    delete_run,
    new_client,
    quick,
    train,
    undisturbed,
    wait_until,
)

from tinkex import events
from tinkex.client.config import ClientConfig
from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.client.service.service_client import ServiceClient
from tinkex.client.session import embedded_server
from tinkex.client.training import recovering_client
from tinkex.errors import InvalidInputError
from tinkex.types import AdamParams


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
    assert told[0].checkpoint.endswith("-000003")
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
    attempts, told = [], []

    def connect() -> ServiceClient:
        attempts.append(server.base_url)
        if len(attempts) == 3:
            server.start()
        return server.connect()

    policy = quick(server, connect=connect, on_recovered=told.append)
    client = new_client(server).with_recovery(policy)
    assert train(client, range(5), disturb=lambda step: step == 3 and server.kill()) == expected
    assert [event.attempt for event in told] == [len(attempts)] == [3]
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
    assert second.result(60) is not None
    assert step.result(60) is not None
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


def test_a_server_that_takes_connections_and_answers_nothing_is_left_in_time(server):
    """The patience is the policy's, whatever a single request may take."""
    expected = undisturbed(server, 1)
    lost = threading.Event()
    policy = quick(server, unreachable_s=1.0, on_lost=lambda event: lost.set())
    client = new_client(server).with_recovery(policy)
    with server.frozen():
        waiting = client.train_step(batch(0), "cross_entropy", ADAM)
        assert lost.wait(60)  # one request alone would wait for longer
    assert [waiting.result(60).loss] == expected
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


def test_a_run_lost_and_then_its_server_is_still_a_loss(server, monkeypatch):
    """Nobody is there to tell a lost run from a mistake of the caller's: ask the next server."""
    expected = undisturbed(server, 4)
    client = new_client(server).with_recovery(quick(server))
    losses = train(client, range(2))
    delete_run(server, client)
    check_run = recovering_client.check_run

    def check_too_late(run, timeout_s):
        monkeypatch.undo()
        server.kill()
        threading.Timer(0.5, server.start).start()
        return check_run(run, timeout_s)

    monkeypatch.setattr(recovering_client, "check_run", check_too_late)
    assert losses + train(client, range(2, 4)) == expected
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


def test_an_embedded_server_that_is_not_started_again_is_replaced(server, tmp_path, monkeypatch):
    """R23 without any server named: it is brought back, and given up only when it keeps dying."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    monkeypatch.setenv("TINKEX_LOCAL_ENGINE", "toy")
    config = ClientConfig.from_env(base_url="local", retry_window_s=0.5)
    with ServiceClient(config=config) as service:
        base = service.get_server_capabilities().supported_models[0].model_name
        policy = RecoveryPolicy(save_every_steps=1, monitor_interval_s=0, initial_delay_s=0.1)
        client = service.create_lora_training_client(base, rank=4, seed=1).with_recovery(policy)
        before = train(client, range(2))
        kill_embedded(tmp_path)
        before += train(client, range(2, 4))
        assert client.num_recoveries == 0  # the client brought it back, where it was
        monkeypatch.setattr(embedded_server, "MAX_RESTARTS", 1)
        kill_embedded(tmp_path)
        before += train(client, range(4, 6))
        # The new server listens where the old one did, and may answer for the lost run meanwhile.
        wait_until(lambda: client.num_recoveries == 1)
        before += train(client, range(6, 7))
        client.close()
    assert before == undisturbed(server, 7)
    kill_embedded(tmp_path)


def kill_embedded(home: Path) -> None:
    (record,) = home.glob("*.json")
    pid = json.loads(record.read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    for child in embedded_server._children:
        if child.pid == pid:
            child.wait(60)

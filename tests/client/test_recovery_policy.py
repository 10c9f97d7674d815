"""What counts as a loss, when to give up, and whom to tell (R23)."""

from __future__ import annotations

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

from tinkex.client.recovery.policy import RecoveryPolicy
from tinkex.client.recovery.run_monitor import RunMonitor
from tinkex.client.service.service_client import ServiceClient
from tinkex.errors import (
    BadRequestError,
    ClientClosedError,
    ConfigError,
    InvalidInputError,
    RecoveryFailedError,
    RequestFailedError,
)
from tinkex.types import Datum, ModelInput


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


def test_a_monitor_tells_ok_lost_and_unreachable_apart(server):
    run = new_client(server)
    monitor = RunMonitor(timeout_s=60.0)
    assert monitor.check(run).state == "ok"
    run.unload_model().result(60)
    lost = monitor.check(run)
    assert (lost.state, "unloaded" in lost.reason) == ("lost", True)
    server.kill()
    assert monitor.check(run).state == "unreachable"


def test_a_mistake_of_the_caller_is_no_loss(server):
    client = new_client(server).with_recovery(quick(server))
    tokens = [10**8]
    wrong = [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": [1.0]})]
    with pytest.raises((RequestFailedError, InvalidInputError, ValueError)):
        client.forward_backward(wrong, "cross_entropy").result(60)
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
    client._end()


def test_what_was_told_to_have_failed_is_not_done_later(server):
    """The loop makes the step again; done twice, training would be silently different."""
    expected = undisturbed(server, 3)
    client = new_client(server).with_recovery(quick(server, max_attempts=1, save_every_steps=1))
    losses = train(client, range(1))
    server.kill()
    pending = client.train_step(batch(1), "cross_entropy", ADAM)
    for _ in range(2):
        with pytest.raises(RecoveryFailedError):
            client.train_step(batch(1), "cross_entropy", ADAM).result(60)
    with pytest.raises(RecoveryFailedError):
        pending.result(60)
    server.start()
    assert losses + train(client, range(1, 3)) == expected
    client.close()


def test_a_run_that_was_unloaded_on_purpose_stays_unloaded(server):
    client = new_client(server).with_recovery(quick(server, save_every_steps=0))
    client.unload_model().result(60)
    with pytest.raises((BadRequestError, RequestFailedError), match="unloaded"):
        client.forward(batch(0), "cross_entropy").result(60)
    assert client.num_recoveries == 0
    client.close()


def test_after_close_a_call_fails_at_once_whether_the_server_lives_or_not(server):
    client = new_client(server).with_recovery(quick(server))
    client.close()
    for kill in (lambda: None, server.kill):
        kill()
        with pytest.raises(ClientClosedError, match="Make a new one"):
            client.forward(batch(0), "cross_entropy").result(60)


def test_closing_ends_the_attempts(server):
    client = new_client(server).with_recovery(
        quick(server, max_attempts=1000, initial_delay_s=30.0, max_delay_s=60.0)
    )
    server.kill()
    waiting = client.forward(batch(0), "cross_entropy")
    wait_until(lambda: "attempt 2" in str(waiting.status()))
    client.close()
    with pytest.raises(RecoveryFailedError, match="the client was closed"):
        waiting.result(60)


def test_a_server_that_is_gone_before_the_first_checkpoint_is_told(server):
    """There is nothing to go back to, and nothing to wait for."""
    run = new_client(server)
    server.kill()
    with pytest.raises(RecoveryFailedError, match="could not be rebuilt"):
        run.with_recovery(quick(server, max_attempts=2))


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

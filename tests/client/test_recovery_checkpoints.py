"""From which checkpoint a lost run goes on, and which ones are kept (R23)."""

from __future__ import annotations

import pytest
from recovery_world import (
    batch,
    delete_run,
    new_client,
    quick,
    train,
    undisturbed,
    wait_until,
)

from tinkex.client.futures import APIFuture
from tinkex.errors import (
    BadRequestError,
    InvalidInputError,
    RecoveryFailedError,
    RequestFailedError,
)
from tinkex.types import Datum, ModelInput


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
    told = []
    policy = quick(
        server,
        checkpoint="best",
        metric="score",
        metric_mode="max",
        save_every_steps=0,
        on_recovered=told.append,
    )
    client = new_client(server).with_recovery(policy)
    paths = {}
    for step, score in enumerate([1.0, 7.0, 3.0]):
        train(client, [step])
        saving = client.save_state(f"s{step}", user_metadata={"score": str(score)})
        paths[score] = saving.result().path
    delete_run(server, client)
    client.forward(batch(0), "cross_entropy").result(60)
    assert told[0].checkpoint == paths[7.0]
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
        client.forward(batch(0), "cross_entropy").result(60)  # finished saves are counted by calls
        found = rest.list_checkpoints(client.model_id).result().checkpoints
        return sorted(one.checkpoint_id for one in found)

    wait_until(lambda: len(names()) <= 3 and names()[-1].endswith("-000006"))
    client.close()


def test_a_checkpoint_that_is_gone_is_passed_over(server):
    """The one before it serves, and the calls since then are still known."""
    expected = undisturbed(server, 6)
    told = []
    client = new_client(server).with_recovery(
        quick(server, save_every_steps=2, on_recovered=told.append)
    )
    losses = train(client, range(5))
    wait_until(lambda: client._take_saves() or client._log.saved[-1].path.endswith("-000004"))
    newest = client._log.saved[-1].path
    rest = server.connect().create_rest_client()
    rest.delete_checkpoint_from_tinker_path(newest).result(60)
    delete_run(server, client)
    assert losses + train(client, range(5, 6)) == expected
    assert told[0].checkpoint.endswith("-000002")
    assert told[0].num_forgotten == 0
    client.close()


def lose_the_answer(client, make) -> APIFuture:
    """Make a call whose answer gets lost on its way."""
    client._ended = lambda call, future: None
    answer = make()
    del client._ended
    call = client._log.calls[-1]
    call.made[0].result(60)
    call.made = (APIFuture(), call.made[1])
    client._log._done.clear()
    return answer


def test_a_call_is_never_answered_from_a_later_state(server):
    """Checkpoints after a call whose answer never came cannot give that answer."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=1))
    train(client, range(1))
    expected = client.forward(batch(9), "cross_entropy").result(60).metrics["loss:sum"]
    asked = lose_the_answer(client, lambda: client.forward(batch(9), "cross_entropy"))
    train(client, range(1, 4))
    delete_run(server, client)
    train(client, range(4, 5))
    assert asked.result(60).metrics["loss:sum"] == expected
    client.close()


def test_a_name_being_saved_again_is_not_trusted(server):
    """It may hold the state before or after; repeating calls on the wrong one would be silent."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=0))
    train(client, range(1))
    client.save_state("last").result(60)
    train(client, range(1, 2))
    lose_the_answer(client, lambda: client.save_state("last", overwrite=True))
    delete_run(server, client)
    with pytest.raises(
        RecoveryFailedError, match=r"/last was being saved again.*a name of its own"
    ):
        client.forward(batch(0), "cross_entropy").result(60)
    client.close()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_call_that_cannot_be_repeated_is_told(server, is_awaited):
    """Without its effect the new run would be another one; nobody would notice."""
    client = new_client(server).with_recovery(quick(server))
    path = client.save_state("mine").result(60).path
    train(client, range(1))
    loading = client.load_state_with_optimizer(path)
    assert is_awaited or loading.cancel()
    client.forward(batch(0), "cross_entropy").result(60)
    server.connect().create_rest_client().delete_checkpoint_from_tinker_path(path).result(60)
    delete_run(server, client)
    for _ in range(2):  # and it stays so
        with pytest.raises(RecoveryFailedError, match="load_state_with_optimizer had succeeded"):
            client.forward(batch(0), "cross_entropy").result(60)
    assert client.num_recoveries == 0
    client.close()


def test_a_call_that_failed_fails_again_and_nothing_else(server):
    """The mistake was told; on the new run it is the same mistake."""
    expected = undisturbed(server, 2)
    client = new_client(server).with_recovery(quick(server))
    losses = train(client, range(1))
    with pytest.raises(BadRequestError):
        client.load_state(f"tinker://{client.model_id}/weights/nothing").result(60)
    delete_run(server, client)
    assert losses + train(client, range(1, 2)) == expected
    client.close()


def test_a_mistake_that_was_told_is_not_remembered(server):
    """A call that failed for good must not keep every later call and checkpoint alive."""
    client = new_client(server).with_recovery(quick(server, save_every_steps=1))
    wrong = [Datum(ModelInput.from_ints([10**8]), {"target_tokens": [1], "weights": [1.0]})]
    with pytest.raises((RequestFailedError, InvalidInputError, ValueError)):
        client.forward_backward(wrong, "cross_entropy").result(60)
    train(client, range(6))
    wait_until(lambda: client._take_saves() or len(client._log.calls) <= 6)
    client.close()

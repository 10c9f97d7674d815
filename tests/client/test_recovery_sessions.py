"""What becomes of the session, and of the ServiceClient, whose run was lost (R23)."""

from __future__ import annotations

from functools import partial

import pytest
from recovery_world import ADAM, batch, delete_run, new_client, quick, train, wait_until

from tinkex import events
from tinkex.errors import ClientClosedError, RetryableException
from tinkex.types import ModelInput, SamplingParams


def test_the_first_session_ends_with_its_server(server):
    """Nobody sends heartbeats, or a goodbye, to a server that is gone for good."""
    first = new_client(server)
    client = first.with_recovery(quick(server))
    server.kill()
    server.start()
    train(client, range(1))
    wait_until(lambda: first.holder.session.is_over)
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
    assert not first.holder.session.is_over
    end()
    client.close()


PROMPT = ModelInput.from_ints([1, 2, 3])


def sample(sampler, timeout: float = 30.0) -> list[int]:
    params = SamplingParams(max_tokens=4, seed=1, temperature=0.0)
    return sampler.sample(PROMPT, 1, params).result(timeout).sequences[0].tokens


def new_run(service):
    base = service.get_server_capabilities().supported_models[0].model_name
    return base, service.create_lora_training_client(base, rank=4, seed=1)


def test_a_service_client_moves_to_the_new_session_with_its_run(server):
    """Another server, at another address: whoever holds the first client goes on with it."""
    service = server.connect()
    base, first = new_run(service)
    before = service.holder.session_id
    client = first.with_recovery(quick(server))
    for _ in range(2):
        server.kill()
        server.start()
        train(client, range(1))
    assert service.holder is client.holder
    assert service.holder.session_id not in (None, before)
    assert service.get_console_url() == f"{service.holder.config.base_url}/console"
    assert service.get_server_capabilities().supported_models[0].model_name == base
    path = client.save_weights_for_sampler("now").result(60).path
    assert len(sample(service.create_sampling_client(path))) == 4
    runs = service.create_rest_client().list_training_runs().result(60).training_runs
    assert client.model_id in [run.training_run_id for run in runs]
    second = service.create_lora_training_client(base, rank=4, seed=1)
    client.close()  # the session is the service client's now, and lives on
    assert second.train_step(batch(0), "cross_entropy", ADAM).result(60).loss
    assert len(sample(service.create_sampling_client(base_model=base))) == 4
    service.close().result(60)
    assert client.holder.is_closed


def test_what_was_made_in_a_lost_session_says_how_to_go_on(server):
    """At once, not after the patience for a server that may come back."""
    service = server.connect(retry_window_s=600.0)
    base, first = new_run(service)
    sampler, rest = service.create_sampling_client(base_model=base), service.create_rest_client()
    client = first.with_recovery(quick(server))
    assert len(sample(sampler)) == 4
    server.kill()
    server.start()
    waiting = rest.list_training_runs()
    train(client, range(1))
    for call in (partial(sample, sampler), rest.list_training_runs().result, waiting.result):
        with pytest.raises(RetryableException, match="ServiceClient has moved there: make this"):
            call(10)
    client.close()


def test_a_session_that_lives_keeps_its_samplers_when_a_run_of_it_is_lost_again(server):
    """The second session is the recovery's own; a sampler made there is not."""
    client = new_client(server).with_recovery(quick(server))
    delete_run(server, client)
    train(client, range(1))
    sampler = client.save_weights_and_get_sampling_client()
    expected = sample(sampler)
    delete_run(server, client)
    train(client, range(1))
    assert client.num_recoveries == 2
    assert sample(sampler) == expected
    client.close()


def test_a_service_client_that_was_closed_stays_closed(server):
    """Its session lived on when a run of it was lost; the run itself goes on in another."""
    service = server.connect()
    _, first = new_run(service)
    client = first.with_recovery(quick(server))
    delete_run(server, client)
    train(client, range(1))
    service.close().result(60)
    server.kill()
    server.start()
    train(client, range(1))
    assert client.num_recoveries == 2
    with pytest.raises(ClientClosedError):
        service.create_rest_client().list_training_runs().result(60)
    client.close()


def test_two_runs_of_one_session_recover_side_by_side(server):
    service = server.connect()
    base, first = new_run(service)
    other = service.create_lora_training_client(base, rank=4, seed=1)
    clients = [run.with_recovery(quick(server)) for run in (first, other)]
    server.kill()
    server.start()
    losses = [train(client, range(2)) for client in clients]
    assert losses[0] == losses[1]
    assert [client.num_recoveries for client in clients] == [1, 1]
    assert service.holder in [client.holder for client in clients]
    for client in clients:
        client.close()
    assert service.create_lora_training_client(base, rank=4).get_info().model_id

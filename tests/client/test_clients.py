"""The clients against a real server on the toy engine (R11-R13, R15, R16, R27)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datums import datum
from recovery_world import Server

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.futures import spawn

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
IGNORED = types.Datum(
    types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, -100], "weights": [1.0, 1.0]}
)
FULL = types.ModelInput.from_ints([1] * 32768)
PROMPT = types.ModelInput.from_ints([11, 23, 35])
PARAMS = types.SamplingParams(max_tokens=6, seed=3)


@pytest.fixture
def service(toy_server: str) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=toy_server, api_key="tml-clients") as client:
        yield client


@pytest.fixture
def training(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=1)


def test_train_step_lowers_the_loss_and_returns_both_halves(
    training: tinkex.TrainingClient,
) -> None:
    steps = [
        training.train_step(
            [datum([1, 2, 3, 4])], "cross_entropy", types.AdamParams(learning_rate=0.01)
        )
        for _ in range(5)
    ]
    losses = [step.result(60).loss for step in steps]
    assert losses == sorted(losses, reverse=True)
    last = steps[-1].result()
    assert last.metrics["step:max"] == 5.0
    assert last.metrics["loss:sum"] == last.loss
    assert len(last.loss_fn_outputs) == 1


def test_a_step_may_end_before_the_call_that_made_it_returns(
    training: tinkex.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(start: Any) -> Any:
        future = spawn(start)
        concurrent.futures.wait([future], 60)
        return future

    monkeypatch.setattr("tinkex.client.training.training_client.spawn", late)
    step = training.train_step([datum([1, 2, 3])], "cross_entropy", types.AdamParams())
    assert step.result(60).metrics["step:max"] == 1.0
    assert step.status().request_id


def test_order_is_fixed_at_call_time_from_several_threads(training: tinkex.TrainingClient) -> None:
    """R11: nothing is awaited between the calls; each thread's steps run in its order."""
    futures: dict[int, list[Any]] = {n: [] for n in range(4)}

    def work(number: int) -> None:
        for _ in range(10):
            futures[number].append(
                training.train_step([datum([number + 1, 2])], "cross_entropy", types.AdamParams())
            )

    threads = [threading.Thread(target=work, args=(n,)) for n in futures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {n: [f.result(60).metrics["step:max"] for f in fs] for n, fs in futures.items()}
    for steps in counts.values():
        assert steps == sorted(steps)
    assert sorted(s for steps in counts.values() for s in steps) == list(map(float, range(1, 41)))


def test_an_error_in_one_call_leaves_the_client_usable(training: tinkex.TrainingClient) -> None:
    """R11."""
    good = datum([1, 2, 3])
    bad = types.Datum(types.ModelInput.from_ints([10**8]), {"target_tokens": [1], "weights": [1.0]})
    first = training.forward_backward([good], "cross_entropy")
    broken = training.forward_backward([bad], "cross_entropy")
    last = training.forward([good], "cross_entropy")
    assert first.result(60).metrics["loss:sum"] > 0
    with pytest.raises((tinkex.BadRequestError, tinkex.RequestFailedError)) as caught:
        broken.result(60)
    assert caught.value.category == "user"
    assert last.result(60).metrics == pytest.approx(first.result().metrics)


def test_a_large_batch_travels_in_chunks_and_comes_back_whole(
    training: tinkex.TrainingClient,
) -> None:
    data = [datum([n % 50 + 1, n % 7 + 1, 3]) for n in range(2500)]
    whole = training.forward(data, "cross_entropy").result(60)
    parts = [training.forward(data[i : i + 500], "cross_entropy") for i in range(0, 2500, 500)]
    expected = [out for part in parts for out in part.result(60).loss_fn_outputs]
    assert [o["logprobs"] for o in whole.loss_fn_outputs] == [o["logprobs"] for o in expected]
    total = sum(part.result().metrics["loss:sum"] for part in parts)
    assert whole.metrics["loss:sum"] == pytest.approx(total)


def test_state_is_saved_and_resumed_exactly(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    data, adam = [datum([1, 2, 3, 4])], types.AdamParams(learning_rate=0.01)
    training.train_step(data, "cross_entropy", adam)
    path = training.save_state("here", ttl_seconds=7200).result(60).path
    expected = training.train_step(data, "cross_entropy", adam)
    after = training.forward(data, "cross_entropy").result(60).metrics["loss:sum"]
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.train_step(data, "cross_entropy", adam).result(60).loss == expected.result().loss
    assert resumed.forward(data, "cross_entropy").result(60).metrics["loss:sum"] == after
    fresh = service.create_training_client_from_state(path)
    fresh.train_step(data, "cross_entropy", adam).result(60)
    assert fresh.forward(data, "cross_entropy").result(60).metrics["loss:sum"] != after


def test_a_custom_loss_is_the_callable_s_own(training: tinkex.TrainingClient) -> None:
    """R21: `loss:sum` is the custom loss."""

    def twice(data: Any, logprobs: Any) -> Any:
        loss = -2 * sum(x.sum() for x in logprobs)
        return loss, {"mine:sum": 3.0}

    data = [datum([1, 2, 3])]
    plain = training.forward(data, "cross_entropy").result(60).metrics["loss:sum"]
    result = training.forward_backward_custom(data, twice).result(60)
    assert result.metrics["loss:sum"] == pytest.approx(2 * plain, rel=1e-5)
    assert result.metrics["mine:sum"] == 3.0


def test_unload_and_info(training: tinkex.TrainingClient) -> None:
    assert training.get_info().model_data.model_name == MODEL
    assert training.unload_model().result(60).model_id == training.model_id


async def test_every_call_has_an_async_twin_that_does_not_block(toy_server: str) -> None:
    async with tinkex.ServiceClient(base_url=toy_server, api_key="tml-clients") as service:
        client = await service.create_lora_training_client_async(MODEL, rank=4)
        loss = await client.forward_backward_async([datum([1, 2, 3])], "cross_entropy")
        step = await client.optim_step_async(types.AdamParams())
        first, _ = await asyncio.gather(loss, step)
        assert first.metrics["loss:sum"] > 0
        sampler = await client.save_weights_and_get_sampling_client_async()
        answers = await asyncio.gather(
            *(sampler.sample_async(PROMPT, 1, PARAMS) for _ in range(20))
        )
        assert len({tuple(a.sequences[0].tokens) for a in answers}) == 1
        assert (await sampler.compute_logprobs_async(PROMPT))[0] is None
        assert await sampler.get_base_model_async() == MODEL
        result = await (
            await client.train_step_async([datum([1, 2])], "cross_entropy", types.AdamParams())
        )
        assert result.loss is not None


def test_thousands_of_samples_are_unique_and_complete(service: tinkex.ServiceClient) -> None:
    """R13."""
    sampler = service.create_sampling_client(base_model=MODEL)
    futures = [
        sampler.sample(types.ModelInput.from_ints([n % 100 + 1]), 1, PARAMS) for n in range(2000)
    ]
    answers = [future.result(120) for future in futures]
    ids = [sequence.sequence_id for answer in answers for sequence in answer.sequences]
    assert len(set(ids)) == 2000
    assert answers[5].sequences[0].tokens == answers[105].sequences[0].tokens


def test_tokens_stream_while_they_are_generated(service: tinkex.ServiceClient) -> None:
    """R27."""
    sampler = service.create_sampling_client(base_model=MODEL)
    stream = sampler.stream(PROMPT, PARAMS)
    pieces = list(stream)
    whole = sampler.sample(PROMPT, 1, PARAMS).result(60).sequences[0]
    assert len(pieces) > 1
    assert (
        [t for piece in pieces for t in piece.tokens]
        == whole.tokens
        == stream.result.sequences[0].tokens
    )
    with pytest.raises(RuntimeError, match="once"):
        list(stream)


def test_a_prompt_of_one_token_has_one_logprob_and_it_is_none(
    service: tinkex.ServiceClient,
) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    assert sampler.compute_logprobs(types.ModelInput.from_ints([1])).result(60) == [None]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda s, t: t.forward([IGNORED], "cross_entropy").result(60),
            r"target_tokens: token -100 .* keep its token and give it weight 0",
        ),
        (
            lambda s, t: s.sample(FULL, 1, PARAMS).result(60),
            r"leaves room for 0 .*; shorten the prompt",
        ),
    ],
)
def test_the_server_names_the_fix_too(service: tinkex.ServiceClient, call: Any, says: str) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    training = service.create_lora_training_client(MODEL, rank=4)
    with pytest.raises(tinkex.BadRequestError, match=says):
        call(sampler, training)
    assert training.forward([datum([1, 2])], "cross_entropy").result(60).metrics["loss:sum"] > 0


def test_a_stream_of_a_closed_client_is_an_error_not_a_wait(toy_server: str) -> None:
    with tinkex.ServiceClient(base_url=toy_server, api_key="tml-clients") as service:
        sampler = service.create_sampling_client(base_model=MODEL)
    with pytest.raises(tinkex.ClientClosedError):
        list(sampler.stream(PROMPT, PARAMS))


async def test_a_stream_can_be_left_early_and_read_asynchronously(toy_server: str) -> None:
    service = tinkex.ServiceClient(base_url=toy_server, api_key="tml-clients")
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    async for piece in sampler.stream(PROMPT, types.SamplingParams(max_tokens=500, seed=1)):
        assert piece.tokens
        break
    answer = await sampler.sample_async(PROMPT, 1, PARAMS)
    assert len(answer.sequences[0].tokens) == 6
    await service.close("success")


def _sample_elsewhere(pickled: bytes, queue: Any) -> None:
    sampler = pickle.loads(pickled)
    answer = sampler.sample(PROMPT, 1, PARAMS).result(60)
    queue.put((answer.sequences[0].tokens, answer.sequences[0].sequence_id))


def test_a_sampling_client_works_in_another_process(service: tinkex.ServiceClient) -> None:
    """R13: pickled, with a clone number of its own."""
    sampler = service.create_sampling_client(base_model=MODEL)
    here = sampler.sample(PROMPT, 1, PARAMS).result(60).sequences[0]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_sample_elsewhere, args=(pickle.dumps(sampler), queue))
    child.start()
    tokens, sequence_id = queue.get(timeout=90)
    child.join(60)
    assert tokens == here.tokens
    assert sequence_id != here.sequence_id


def test_a_handle_carries_no_credential(service: tinkex.ServiceClient) -> None:
    import base64

    sampler = service.create_sampling_client(base_model=MODEL)
    handle = sampler.get_sampler_handle()
    assert b"tml-clients" not in base64.urlsafe_b64decode(handle)
    again = tinkex.SamplingClient.from_sampler_handle(handle, api_key="tml-clients")
    assert again.sample(PROMPT, 1, PARAMS).result(60).sequences[0].tokens
    with pytest.raises(tinkex.InvalidInputError, match="not a sampler handle"):
        tinkex.SamplingClient.from_sampler_handle("bm9uc2Vuc2U=")


def test_service_and_training_clients_do_not_pickle(training: tinkex.TrainingClient) -> None:
    with pytest.raises(TypeError, match="belongs to the process"):
        pickle.dumps(training)


def test_rest_lists_what_was_made(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> None:
    """R16."""
    path = training.save_state("listed").result(60).path
    rest = service.create_rest_client()
    assert (
        rest.get_training_run_by_tinker_path(path).result(60).training_run_id == training.model_id
    )
    assert [
        c.checkpoint_id for c in rest.list_checkpoints(training.model_id).result(60).checkpoints
    ] == ["weights/listed"]
    rest.publish_checkpoint_from_tinker_path(path).result(60)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(60)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(60)
    rest.unpublish_checkpoint_from_tinker_path(path).result(60)
    assert rest.get_weights_info_by_tinker_path(path).result(60).lora_rank == 4
    assert training.model_id in {run.training_run_id for run in rest.iter_training_runs()}
    assert path in {checkpoint.tinker_path for checkpoint in rest.iter_user_checkpoints()}
    rest.delete_checkpoint_from_tinker_path(path).result(60)
    assert rest.list_checkpoints(training.model_id).result(60).checkpoints == []
    with pytest.raises(tinkex.NotFoundError):
        rest.get_training_run("nobody:train:0").result(60)


def test_a_closed_client_says_so_and_ends_its_waiting_calls(toy_server: str) -> None:
    service = tinkex.ServiceClient(base_url=toy_server, api_key="tml-clients")
    client = service.create_lora_training_client(MODEL, rank=4)
    service.close("success").result(60)
    service.close("success").result(60)
    with pytest.raises(tinkex.ClientClosedError):
        client.forward([datum([1, 2])], "cross_entropy").result(60)


def test_several_services_live_side_by_side(toy_server: str) -> None:
    """R9: no global state."""
    configs = [
        ClientConfig(base_url=toy_server, api_key=f"tml-{n}", telemetry=False) for n in range(3)
    ]
    services = [tinkex.ServiceClient(config=config) for config in configs]
    samplers = [service.create_sampling_client(base_model=MODEL) for service in services]
    assert len({service.holder.session_id for service in services}) == 3
    tokens = {tuple(s.sample(PROMPT, 1, PARAMS).result(60).sequences[0].tokens) for s in samplers}
    assert len(tokens) == 1
    for service in services:
        service.close("success").result(60)


def _policy_datum(advantage: float) -> types.Datum:
    inputs = {"target_tokens": [2, 3], "logprobs": [-1.0, -1.0], "advantages": [advantage] * 2}
    return types.Datum(types.ModelInput.from_ints([1, 2]), inputs)


def test_a_batch_without_any_advantage_is_told_once(
    training: tinkex.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    some, none = _policy_datum(0.5), _policy_datum(0.0)
    training.forward_backward([some, none], "importance_sampling").result(60)
    training.forward([none], "importance_sampling").result(60)
    assert "advantage" not in caplog.text
    for _ in range(2):
        training.forward_backward([none], "importance_sampling").result(60)
    assert caplog.text.count("Every advantage of this batch is zero") == 1


def test_a_step_without_signal_is_skipped_where_that_is_asked_for(
    training: tinkex.TrainingClient,
) -> None:
    adam, none = types.AdamParams(learning_rate=0.1), [_policy_datum(0.0)]
    before = training.forward(none, "importance_sampling").result(60).loss_fn_outputs
    skipped = training.train_step(none, "importance_sampling", adam, skip_without_signal=True)
    assert skipped.result(60).metrics["skipped:max"] == 1.0
    assert training.forward(none, "importance_sampling").result(60).loss_fn_outputs == before
    made = training.train_step([_policy_datum(0.5)], "ppo", adam, skip_without_signal=True)
    assert made.result(60).metrics["step:max"] == 1.0


def test_an_error_names_the_call_that_was_made(training: tinkex.TrainingClient) -> None:
    bad = types.Datum(types.ModelInput.from_ints([10**8]), {"target_tokens": [1], "weights": [1.0]})
    with pytest.raises(tinkex.TinkerError, match="on forward - "):
        training.forward([bad], "cross_entropy").result(60)
    with pytest.raises(tinkex.TinkerError, match="on forward_backward - "):
        training.forward_backward([bad], "cross_entropy").result(60)


def test_a_loss_name_as_base_says_which_one_works(training: tinkex.TrainingClient) -> None:
    with pytest.raises(tinkex.InvalidInputError, match="or 'cross_entropy'.*got 'ppo'"):
        training.forward_backward_regularized([datum([1, 2, 3])], "ppo", [])
    with pytest.raises(tinkex.InvalidInputError, match="got 'ppo'.*is for forward_backward"):
        training.forward_backward_custom([datum([1, 2, 3])], "ppo")


def test_a_sample_that_runs_is_not_called_queued(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.latency_s = 3.0
    server.start()
    service = tinkex.ServiceClient(base_url=server.base_url, api_key="tml-slow")
    sampler = service.create_sampling_client(base_model=MODEL)
    future = sampler.sample(PROMPT, 1, PARAMS)
    states = set()
    while not future.done():
        states.add(future.status().state)
        time.sleep(0.02)
    service.close().result(60)
    server.kill()
    assert "running" in states
    assert "queued" not in states

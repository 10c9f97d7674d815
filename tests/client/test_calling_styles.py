"""Every call works awaited, with `.result()`, and as its own result: SDK 0.38, 0.36 and 0.4.1."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from datums import datum
from patience import until

import tinkex
from tinkex import types

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
DATUM = datum([1, 2, 3])
PROMPT = types.ModelInput.from_ints([11, 23, 35])
PARAMS = types.SamplingParams(max_tokens=4, seed=3)


@pytest.fixture
def service(toy_server: str) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=toy_server, api_key="tml-styles") as client:
        yield client


def loss(client: Any) -> float:
    value: float = client.forward([DATUM], "cross_entropy").result(60).metrics["loss:sum"]
    return value


CLIENTS = {
    "create_lora_training_client": lambda s: s.create_lora_training_client(MODEL, rank=4),
    "create_sampling_client": lambda s: s.create_sampling_client(base_model=MODEL),
    "create_rest_client": lambda s: s.create_rest_client(),
    "get_server_capabilities": lambda s: s.get_server_capabilities(),
    "save_weights_and_get_sampling_client": lambda s: s.create_lora_training_client(
        MODEL, rank=4
    ).save_weights_and_get_sampling_client(),
    "get_info": lambda s: s.create_lora_training_client(MODEL, rank=4).get_info(),
}
KINDS = {
    "create_lora_training_client": tinkex.TrainingClient,
    "create_sampling_client": tinkex.SamplingClient,
    "create_rest_client": tinkex.RestClient,
    "get_server_capabilities": types.GetServerCapabilitiesResponse,
    "save_weights_and_get_sampling_client": tinkex.SamplingClient,
    "get_info": types.GetInfoResponse,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_it_is_a_future_and_passes_for_its_result(service: tinkex.ServiceClient, name: str) -> None:
    made = CLIENTS[name](service)
    assert isinstance(made, tinkex.APIFuture)
    assert isinstance(made, concurrent.futures.Future)
    assert isinstance(made, KINDS[name])
    assert type(made.result()) is KINDS[name]
    assert made.future().result() is made.result()
    assert made.done()
    assert repr(made) == repr(made.result())


@pytest.mark.parametrize("name", CLIENTS)
async def test_it_is_awaited_without_stopping_the_loop(
    toy_server: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with tinkex.ServiceClient(base_url=toy_server, api_key="tml-styles") as service:
        if name not in ("save_weights_and_get_sampling_client", "get_info"):
            made = CLIENTS[name](service)
        else:
            training = await service.create_lora_training_client(MODEL, rank=4)
            made = getattr(training, name)()
        assert type(await made) is KINDS[name]
        assert type(await asyncio.create_task(made.coroutine())) is KINDS[name]
        assert await asyncio.gather(made, made.coroutine()) == [made.result()] * 2
        assert "blocks the running event loop" not in caplog.text


def test_a_loop_of_the_new_style_without_asyncio(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=4).result(60)
    done = training.forward_backward([DATUM], "cross_entropy")
    step = training.optim_step(types.AdamParams())
    assert done.result(60).metrics["loss:sum"] > 0
    assert step.future().result(60).metrics is not None
    sampler = training.save_weights_and_get_sampling_client().result(60)
    assert sampler.sample(PROMPT, 1, PARAMS).result(60).sequences[0].tokens
    assert service.get_server_capabilities().result(60).supported_models[0].model_name == MODEL


@pytest.mark.usefixtures("default_model_dir")  # its tokenizer
async def test_a_loop_of_the_new_style_with_asyncio(toy_server: str) -> None:
    service = tinkex.ServiceClient(base_url=toy_server, api_key="tml-styles")
    training = await service.create_lora_training_client(MODEL, rank=4)
    done = training.forward_backward([DATUM], "cross_entropy")
    step = training.optim_step(types.AdamParams())
    assert (await done).metrics["loss:sum"] > 0
    await step
    sampler = await training.save_weights_and_get_sampling_client()
    tasks = [asyncio.create_task(sampler.sample(PROMPT, 1, PARAMS).coroutine()) for _ in "ab"]
    first, second = await asyncio.gather(*tasks)
    assert first.sequences[0].tokens == second.sequences[0].tokens
    assert (await training.get_tokenizer()).encode("hello") == (
        await training.get_tokenizer_async()
    ).encode("hello")
    assert await sampler.get_base_model() == await sampler.get_base_model_async() == MODEL
    await service.close()


@pytest.mark.usefixtures("default_model_dir")  # its tokenizer
def test_the_old_direct_use(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=4)
    assert loss(training) > 0
    assert training.model_id.endswith(":train:0")
    sampler = training.save_weights_and_get_sampling_client()
    assert len(sampler.sample(PROMPT, 2, PARAMS).result(60).sequences) == 2
    name = sampler.get_base_model()
    assert name == MODEL
    assert isinstance(name, str)
    assert name.result() == name.future().result() == MODEL
    tokenizer = sampler.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert len(tokenizer) == len(tokenizer.result())


def test_an_error_is_raised_where_the_call_is_made(service: tinkex.ServiceClient) -> None:
    """As programs expect that try to resume and else begin afresh."""
    with pytest.raises(tinkex.TinkerError):
        service.create_training_client_from_state("tinker://nobody:train:0/weights/x")


async def test_used_before_it_is_there_in_a_loop_it_waits_and_says_so(
    toy_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = tinkex.ServiceClient(base_url=toy_server, api_key="tml-styles")
    training = service.create_lora_training_client(MODEL, rank=4)
    assert "create_lora_training_client(): " in repr(training)
    assert loss(training) > 0
    assert "await create_lora_training_client() instead" in caplog.text
    await service.close()


async def test_an_error_in_a_loop_reaches_who_awaits_and_who_uses_it(toy_server: str) -> None:
    service = tinkex.ServiceClient(base_url=toy_server, api_key="tml-styles")
    training = service.create_training_client_from_state("tinker://nobody:train:0/weights/x")
    with pytest.raises(tinkex.TinkerError):
        await training
    with pytest.raises(tinkex.TinkerError):
        training.forward([DATUM], "cross_entropy")
    await service.close()


def test_what_is_set_on_it_is_set_on_the_client(service: tinkex.ServiceClient) -> None:
    training = service.create_lora_training_client(MODEL, rank=4)
    told: list[Any] = []
    training.on_queue_state_change = lambda state, reason: told.append(state)
    assert training.result().on_queue_state_change is training.on_queue_state_change


def test_it_pickles_and_copies_as_its_result(service: tinkex.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    again = pickle.loads(pickle.dumps(sampler))
    assert type(again) is tinkex.SamplingClient
    assert again.sampling_session_id == sampler.sampling_session_id
    with pytest.raises(TypeError, match="belongs to the process"):
        copy.copy(service.create_lora_training_client(MODEL, rank=4))


def test_reprs_say_what_a_person_asks_first(service: tinkex.ServiceClient) -> None:
    where = service.config.base_url
    assert repr(service) == f"<ServiceClient of {where}, session not begun>"
    training = service.create_lora_training_client(MODEL, rank=4)
    assert repr(training) == f"<TrainingClient {training.model_id} of {MODEL} at {where}>"
    assert repr(service) == f"<ServiceClient of {where}, session {service.holder.session_id}>"
    sampler = service.create_sampling_client(base_model=MODEL)
    named = f"<SamplingClient {sampler.sampling_session_id} of {MODEL} at {where}>"
    assert repr(sampler) == named
    assert repr(service.create_rest_client()) == f"<RestClient of {where}>"
    done = training.forward([DATUM], "cross_entropy")
    done.result(60)
    assert repr(done).startswith("<APIFuture done (")


async def test_awaiting_a_result_says_what_to_write(service: tinkex.ServiceClient) -> None:
    sampler = await service.create_sampling_client(base_model=MODEL)
    future = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(tinkex.TinkerError, match="Write `await future`"):
        await future.result()
    assert (await future).sequences


async def test_a_forgotten_await_says_so(service: tinkex.ServiceClient) -> None:
    forgotten = service.get_server_capabilities_async()
    with pytest.raises(AttributeError, match="write `await get_server_capabilities_async"):
        _ = forgotten.supported_models  # type: ignore[attr-defined]
    assert (await forgotten).supported_models


@pytest.mark.filterwarnings("ignore:.*is deprecated since SDK 0.38")
def test_an_async_call_that_is_dropped_is_named_by_python(service: tinkex.ServiceClient) -> None:
    def drop() -> None:
        service.get_server_capabilities_async()
        gc.collect()

    with pytest.warns(RuntimeWarning, match="'get_server_capabilities_async' was never awaited"):
        drop()


def test_an_async_call_goes_wherever_a_coroutine_goes(service: tinkex.ServiceClient) -> None:
    async def main() -> list[Any]:
        ask = service.get_server_capabilities_async
        task = asyncio.create_task(ask())
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(ask())
        together = await asyncio.gather(ask(), asyncio.wait_for(ask(), 60))
        return [await task, grouped.result(), *together, await asyncio.shield(ask())]

    kind = types.GetServerCapabilitiesResponse
    assert {type(answer) for answer in asyncio.run(main())} == {kind}
    assert isinstance(asyncio.run(service.get_server_capabilities_async()), kind)  # type: ignore[arg-type]


def test_help_shows_the_value_of_an_awaited_twin() -> None:
    import inspect

    def shown(method: Any) -> Any:
        return inspect.signature(method).return_annotation

    assert shown(tinkex.RestClient.list_training_runs_async) == "types.TrainingRunsResponse"
    service = tinkex.ServiceClient
    assert shown(service.create_lora_training_client_async) == "TrainingClient"
    assert shown(service.get_server_capabilities_async) == "types.GetServerCapabilitiesResponse"
    assert shown(tinkex.TrainingClient.get_tokenizer_async) == "Tokenizer"
    clients = (service, tinkex.TrainingClient, tinkex.SamplingClient, tinkex.RestClient)
    for name, method in (pair for each in clients for pair in vars(each).items()):
        if name.endswith("_async"):
            assert shown(method) not in ("Any", inspect.Signature.empty), name


def test_a_message_given_a_bare_value_says_which_keyword() -> None:
    with pytest.raises(TypeError, match=r"AdamParams\(learning_rate=0.001\)"):
        types.AdamParams(1e-3)  # type: ignore[misc]


def test_a_running_sample_says_that_it_runs(service: tinkex.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    params = types.SamplingParams(max_tokens=3000, seed=3, stop=[])
    future = sampler.sample(PROMPT, 1, params)

    def is_seen_running() -> bool:
        status = future.status()
        return bool(status.num_polls and status.state == "running")

    until(lambda: is_seen_running() or future.done(), future.status)
    future.cancel()


def test_a_step_without_a_gradient_is_told_of(
    service: tinkex.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    training = service.create_lora_training_client(MODEL, rank=4)
    adam = types.AdamParams(learning_rate=1e-3)
    training.optim_step(adam).result(60)
    training.optim_step(adam).result(60)
    assert [r.getMessage()[:43] for r in caplog.records if r.name == "tinkex.training"] == [
        "optim_step was called and no gradient was g"
    ]
    caplog.clear()
    training.forward_backward([DATUM], "cross_entropy")
    training.optim_step(adam).result(60)
    assert not [r for r in caplog.records if r.name == "tinkex.training"]

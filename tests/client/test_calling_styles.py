"""Every call works awaited, with `.result()`, and as its own result: SDK 0.38, 0.36 and 0.4.1."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from datums import datum

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

"""What SDK 0.38 deprecates works here, and says once, at the program's own line, what to write."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex.client import deprecations
from tinkex.client.background_loop import background

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecations, "_told", set())


@pytest.fixture
def service(toy_server: str) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=toy_server, api_key="tml-old") as made:
        yield made


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in caught if item.category is DeprecationWarning]


def test_the_new_style_is_told_nothing(service: tinkex.ServiceClient) -> None:
    async def awaited() -> None:
        training = await service.create_lora_training_client(MODEL, rank=4)
        done = training.forward_backward([DATUM], "cross_entropy")
        await training.optim_step(types.AdamParams())
        assert (await done).metrics["loss:sum"] > 0
        sampler = await training.save_weights_and_get_sampling_client()
        assert (await sampler.sample(PROMPT, 1, PARAMS)).sequences
        assert (await service.create_rest_client().list_sessions()).sessions

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(awaited())
        training = service.create_lora_training_client(MODEL, rank=4).result()
        assert training.get_info().result().lora_rank == 4
    assert told(caught) == []


def test_an_async_form_works_and_names_what_to_await(service: tinkex.ServiceClient) -> None:
    async def old() -> Any:
        training = await service.create_lora_training_client_async(MODEL, rank=4)
        first = await training.forward_backward_async([DATUM], "cross_entropy")
        again = await training.forward_backward_async([DATUM], "cross_entropy")
        await again.result_async()
        rest = service.create_rest_client()
        assert (await rest.list_sessions_async()).sessions
        return await first.result_async()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert asyncio.run(old()).metrics["loss:sum"] > 0
    assert told(caught) == [
        f"{name}_async() is deprecated since SDK 0.38 and goes on working: await {name}() instead."
        for name in ("create_lora_training_client", "forward_backward", "list_sessions")
    ]
    assert {item.filename for item in caught} == {__file__}


def test_a_task_of_an_async_form_is_told_at_a_line_of_the_program(
    service: tinkex.ServiceClient,
) -> None:
    async def old() -> None:
        rest = service.create_rest_client()
        await asyncio.gather(*(rest.list_sessions_async() for _ in range(3)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(old())
    [warning] = [item for item in caught if item.category is DeprecationWarning]
    line = old.__code__.co_firstlineno + 2
    assert (warning.filename, warning.lineno) == (__file__, line), "of the call, not of asyncio.run"


def test_a_client_used_before_its_result_works_and_is_told_once(
    service: tinkex.ServiceClient,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = service.create_lora_training_client(MODEL, rank=4)
        assert training.model_id
        assert training.forward_backward([DATUM], "cross_entropy").result().metrics
        service.create_rest_client().list_sessions().result()
    assert told(caught) == [
        "Using what create_lora_training_client() gives as the client itself is deprecated since "
        "SDK 0.38 and goes on working: take its .result(), or await it."
    ]
    assert {item.filename for item in caught} == {__file__}


def test_waiting_in_a_callback_of_the_sdk_is_a_runtime_error_and_not_a_hang(
    service: tinkex.ServiceClient,
) -> None:
    """As of a done-callback, which the SDK's own thread runs."""
    rest = service.create_rest_client()
    errors: list[BaseException | None] = []
    ended = threading.Event()

    def wait_there() -> None:
        try:
            rest.list_sessions().result()
        except BaseException as exc:
            errors.append(exc)
        finally:
            ended.set()

    background().submit(wait_there)
    assert ended.wait(60)
    [error] = errors
    assert isinstance(error, RuntimeError)
    assert isinstance(error, tinkex.TinkerError)
    assert "the SDK's own thread" in str(error)


def test_what_has_no_effect_is_told_at_the_line_of_the_program(
    service: tinkex.ServiceClient,
) -> None:
    """Whichever way it is called: a twin, a task and a recovering client stand between."""
    rest, training = service.create_rest_client().result(), made(service)
    recovering = training.with_recovery(tinkex.RecoveryPolicy(save_every_steps=0))

    async def old() -> None:
        with contextlib.suppress(tinkex.TinkerError):
            await rest.get_audit_log_async()
        await training.save_weights_and_get_sampling_client_async("named")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(tinkex.TinkerError):
            rest.get_audit_log().result()
        asyncio.run(old())
        for client in (training, recovering):
            client.save_weights_and_get_sampling_client("named").result()
            client.forward_backward_custom([DATUM], loss_of, loss_type_input="logprobs").result()
        tinkex.ServiceClient(base_url="http://127.0.0.1:1", own=1)
    future = [item for item in caught if item.category is FutureWarning]
    assert len(future) >= 7
    assert {item.filename for item in future} == {__file__}


def made(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4).result()


def loss_of(data: Any, logprobs: Any) -> Any:
    loss = -sum(each.sum() for each in logprobs)
    return loss, {"loss": float(loss)}

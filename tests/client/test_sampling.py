"""One sample: how it is submitted, held back, lost, cancelled, cloned and checked (contract 6)."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np
import orjson
import pytest
from hostile import Network, Server, json_reply
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.futures import Waiting
from tinkex.client.http.http1 import Reply
from tinkex.client.sampling import sample_calls as sampling_module
from tinkex.client.sampling.sample_requests import check_answer, sample_request
from tinkex.client.sampling.sample_stream import SampleStream
from tinkex.client.session.holder import Holder
from tinkex.wire import requests

PROMPT = types.ModelInput.from_ints([3, 1, 2])
PARAMS = types.SamplingParams(max_tokens=4)


class Recording(Server):
    """Remembers the samples that arrived, refused ones included."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.bodies: list[dict[str, Any]] = []
        self.refuse: list[Reply] = []
        self.acknowledged: list[str] = []
        self.joined = 0

    def on_asample(self, headers: Mapping[str, str], body: bytes) -> Reply:
        assert headers["X-Tinker-Sampling-Backpressure"] == "1"
        self.bodies.append(orjson.loads(body))
        return self.refuse.pop(0) if self.refuse else super().on_asample(headers, body)

    async def on_retrieve_futures(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.acknowledged += orjson.loads(body)["retrieved_request_ids"]
        return await super().on_retrieve_futures(headers, body)

    def on_join_sampling_session(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.joined += 1
        return json_reply({"client_counter": 3})


Program = Callable[[tinkex.SamplingClient], Coroutine[Any, Any, Any]]


def run(server: Server, program: Program) -> Any:
    async def main() -> Any:
        config = ClientConfig(base_url="http://sampling.test", api_key="tml-k", telemetry=False)
        service = tinkex.ServiceClient(config=config)
        network = Network(server, random.Random(0), rate=0.0)
        service._holder = Holder(config, make_backend=network.make_backend)
        sampler = await service.create_sampling_client_async(base_model="m")
        try:
            return await program(sampler)
        finally:
            await service.close("success")

    return run_virtual(main())


async def one(sampler: tinkex.SamplingClient) -> types.SampleResponse:
    return await sampler.sample_async(PROMPT, 1, PARAMS)


def seconds(program: Program) -> Program:
    async def timed(sampler: tinkex.SamplingClient) -> float:
        started = asyncio.get_running_loop().time()
        await program(sampler)
        return asyncio.get_running_loop().time() - started

    return timed


def test_429_is_a_wait_after_which_the_same_number_is_sent_again() -> None:
    """Contract 6.2: seq 0, 0, 0."""
    server = Recording(compute_s=0.0)
    server.refuse = [json_reply({}, 429), json_reply({}, 429)]
    took = run(server, seconds(one))
    assert [body["seq_id"] for body in server.bodies] == [0, 0, 0]
    assert 2.0 <= took < 2.5


@pytest.mark.parametrize(("asked", "waits"), [("7", 7.0), ("86400", 60.0)])
def test_a_busy_server_is_obeyed_for_at_most_a_minute(asked: str, waits: float) -> None:
    server = Recording(compute_s=0.0)
    server.refuse = [json_reply({}, 429, **{"retry-after": asked})]
    assert waits <= run(server, seconds(one)) < waits + 0.5


def test_402_pauses_and_then_goes_on() -> None:
    server = Recording(compute_s=0.0)
    server.refuse = [json_reply({}, 402)]
    assert 5.0 <= run(server, seconds(one)) < 5.5


def test_a_lost_promise_is_a_new_submission_with_a_new_number() -> None:
    server = Recording(compute_s=0.0, lose_samples={0, 1})
    answer = run(server, one)
    assert answer.sequences[0].tokens == [2, 1, 3]
    assert [body["seq_id"] for body in server.bodies] == [0, 1, 2]


def test_a_malformed_sample_is_the_users_error_and_is_not_repeated() -> None:
    server = Recording()
    server.refuse = [json_reply({"detail": "token 99 is not in the vocabulary"}, 400)]
    with pytest.raises(tinkex.BadRequestError, match="not in the vocabulary"):
        run(server, one)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("poller", [False, True])
def test_cancelling_a_sample_cancels_it_on_the_server(poller: bool) -> None:
    async def cancelled(sampler: tinkex.SamplingClient) -> None:
        future = sampler.sample(PROMPT, 1, PARAMS)
        await asyncio.sleep(2)
        future.cancel()
        await asyncio.sleep(2)

    server = Recording(compute_s=500.0, flags={"sample_use_retrieve_futures": poller})
    run(server, cancelled)
    assert server.cancelled == ["S:sample:0:0"]


def test_results_collected_in_bulk_are_acknowledged() -> None:
    """Contract 4.5: the server may forget what was read."""

    async def many(sampler: tinkex.SamplingClient) -> None:
        await asyncio.gather(*(one(sampler) for _ in range(5)))
        await asyncio.sleep(60)

    server = Recording(flags={"sample_use_retrieve_futures": True})
    run(server, many)
    assert sorted(server.acknowledged) == [f"S:sample:0:{n}" for n in range(5)]


def test_a_poller_that_is_refused_for_good_fails_its_waiters() -> None:
    class Refusing(Recording):
        async def on_retrieve_futures(self, headers: Mapping[str, str], body: bytes) -> Reply:
            return json_reply({"detail": "not your session"}, 403)

    server = Refusing(flags={"sample_use_retrieve_futures": True})
    with pytest.raises(tinkex.PermissionDeniedError, match="not your session"):
        run(server, one)


@pytest.mark.parametrize("join", [False, True])
def test_a_clone_counts_in_a_range_of_its_own(join: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 6.5: c x 10^9 + n, c from the server where it can say."""
    server = Recording(compute_s=0.0, flags={"sample_join_sampling_session": join})
    monkeypatch.setattr(sampling_module.random, "randint", lambda low, high: 77)

    async def cloned(sampler: tinkex.SamplingClient) -> None:
        copy = pickle.loads(pickle.dumps(sampler))
        copy.holder = sampler.holder  # the same in-memory server
        await one(copy)
        await one(copy)

    run(server, cloned)
    clone = 3 if join else 77
    assert [body["seq_id"] for body in server.bodies] == [clone * 10**9, clone * 10**9 + 1]
    assert server.joined == (1 if join else 0)


def test_a_clone_joins_as_its_first_sample_says_and_another_one_is_more_patient() -> None:
    class Refusing(Recording):
        def on_join_sampling_session(self, headers: Mapping[str, str], body: bytes) -> Reply:
            answer = super().on_join_sampling_session(headers, body)
            return answer if self.joined > 1 else json_reply({"detail": "down"}, 503)

    async def cloned(sampler: tinkex.SamplingClient) -> None:
        copy = pickle.loads(pickle.dumps(sampler))
        copy.holder = sampler.holder
        hasty = copy.sample(PROMPT, 1, PARAMS, options={"max_retries": 0})
        patient = copy.sample(PROMPT, 1, PARAMS)
        with pytest.raises(tinkex.InternalServerError, match="down"):
            await hasty
        assert (await patient).sequences

    server = Refusing(compute_s=0.0, flags={"sample_join_sampling_session": True})
    run(server, cloned)
    assert server.joined == 2


def test_a_pickled_sampler_keeps_the_settings_of_its_client() -> None:
    async def cloned(sampler: tinkex.SamplingClient) -> None:
        holder, retries = sampler.holder, tinkex.RetryConfig(max_retries=1)
        holder.config = holder.config.replace(timeout_s=7.0, max_retries=0)
        made = await tinkex.SamplingClient.create(holder, base_model="m", retry_config=retries)
        copy = pickle.loads(pickle.dumps(made))
        assert copy.holder is not holder
        assert copy.holder.config == holder.config
        assert copy._retry_config == retries
        handle = tinkex.SamplingClient.from_sampler_handle(
            made.get_sampler_handle(), api_key="tml-k"
        )
        assert handle.holder.config.timeout_s == 60.0

    run(Recording(), cloned)


@pytest.mark.parametrize(
    "said",
    [
        {"error": "no such image", "category": "USER"},
        {"error": {"message": "no such image", "category": "user"}},
    ],
)
def test_a_sample_that_failed_keeps_message_and_category(said: dict[str, Any]) -> None:
    class Failing(Recording):
        async def on_retrieve_futures(self, headers: Mapping[str, str], body: bytes) -> Reply:
            entry = {"state": "failed", "request_id": "S:sample:0:0", **said}
            return json_reply({"completions": [entry], "cursor": 1})

    server = Failing(flags={"sample_use_retrieve_futures": True})
    with pytest.raises(tinkex.RequestFailedError, match="^no such image$") as caught:
        run(server, one)
    assert caught.value.category == "user"
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("tokens", '{"sample_index": 0, "tok', tinkex.APIConnectionError),
        ("tokens", "{}", tinkex.APIResponseValidationError),
        ("tokens", "5", tinkex.APIResponseValidationError),
        ("done", "{}", tinkex.APIResponseValidationError),
        ("done", "null", tinkex.APIResponseValidationError),
        ("progress", "[1]", tinkex.APIResponseValidationError),
        ("odd", "{}", tinkex.APIResponseValidationError),
        ("error", '{"error": {"message": "no", "category": "user"}}', tinkex.RequestFailedError),
    ],
)
def test_a_stream_that_cannot_be_read_ends_in_an_error_of_ours(
    kind: str, text: str, error: type[Exception]
) -> None:
    """One that a proxy cut inside an event, too."""
    stream: Any = SampleStream(None, None)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        stream._reads(kind, text, Waiting())
    if kind == "error":
        assert (str(caught.value), getattr(caught.value, "category", "")) == ("no", "user")


def test_a_sampler_per_step_leaves_nothing_behind() -> None:
    """An RL loop makes thousands of them in one session."""

    async def loop(sampler: tinkex.SamplingClient) -> int:
        for _ in range(50):
            made = await tinkex.SamplingClient.create(sampler.holder, base_model="m")
            await one(made)
        del made
        await asyncio.sleep(60)
        gc.collect()
        return len(sampler.holder.calls)

    flags = {"sample_use_retrieve_futures": True, "tinkex_sample_batch": True}
    assert run(Recording(compute_s=0.0, flags=flags), loop) < 10


def test_more_promised_sequences_than_sent_are_an_error() -> None:
    class Short(Recording):
        def _sample(self, asked: dict[str, Any]) -> dict[str, Any]:
            promise = super()._sample(asked)
            return {**promise, "sample_sequence_ids": ["a", "b"]}

    with pytest.raises(tinkex.APIResponseValidationError, match="expected 2 sequences, got 1"):
        run(Short(compute_s=0.0), one)


def test_a_server_that_ignores_an_option_is_found_out() -> None:
    answer = types.SampleResponse([], np.zeros(5, np.float32))
    scored = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    with pytest.raises(tinkex.APIResponseValidationError, match="last_n was ignored"):
        check_answer(sample_request(PROMPT, 1, PARAMS, **scored), answer)
    with pytest.raises(tinkex.APIResponseValidationError, match="prompt_alt_tokens_k"):
        check_answer(sample_request(PROMPT, 1, PARAMS, prompt_alt_tokens_k=2), answer)


def test_the_body_of_a_sample_is_that_of_the_declared_request() -> None:
    """R33: what the client sends is what the goldens hold."""
    bodies: list[bytes] = []

    class Keeping(Recording):
        def on_asample(self, headers: Mapping[str, str], body: bytes) -> Reply:
            bodies.append(body)
            return super().on_asample(headers, body)

    params = types.SamplingParams(max_tokens=4, temperature=1e-5, stop=["a"])
    run(Keeping(compute_s=0.0), lambda sampler: sampler.sample_async(PROMPT, 1, params))
    request = types.SampleRequest(
        prompt=PROMPT,
        sampling_params=params,
        sampling_session_id="S:sample:0",
        seq_id=0,
        prompt_logprobs=False,
        record_stability_info=False,
    )
    assert bodies == [requests.encode("asample", request).content]
    assert b'"temperature":1e-05' in bodies[0]

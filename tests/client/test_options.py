"""`options=` of every call of every client: sent, waited for and repeated as they say."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from datums import datum
from hostile import Network, Server, json_reply
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.http.call import Call
from tinkex.client.http.http1 import Reply
from tinkex.client.http.transport import Transport
from tinkex.client.session.holder import Holder
from tinkex.errors import ConfigError, InvalidInputError, ResultTimeoutError, TinkerError
from tinkex.regularizers import L2, RegularizerSpec

PATH = "tinker://S:train:0/weights/a"
MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
BATCH = ([datum([1, 2, 3])], "cross_entropy")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    # ServiceClient
    "get_server_capabilities": (),
    "trajectories": ("t",),
    "create_lora_training_client": ("m", 4),
    "create_training_client_from_state": (PATH,),
    "create_training_client_from_state_with_optimizer": (PATH,),
    "create_sampling_client": ("tinker://S:train:0/sampler_weights/a",),
    "copy_weights": (PATH,),
    # TrainingClient
    "forward": BATCH,
    "forward_backward": BATCH,
    "optim_step": (types.AdamParams(),),
    "train_step": (*BATCH, types.AdamParams()),
    "save_state": ("a",),
    "save_weights_for_sampler": ("a",),
    "save_weights_external": ("a",),
    "load_state": (PATH,),
    "load_state_with_optimizer": (PATH,),
    "save_weights_and_get_sampling_client": (),
    "log_metrics": ({"a": 1.0},),
    "log_settings": ({"a": 1},),
    "get_info": (),
    "get_tokenizer": (),
    "unload_model": (),
    # SamplingClient
    "sample": (PROMPT, 1, PARAMS),
    "compute_logprobs": (PROMPT,),
    # RestClient and AdminClient
    "get_training_run": ("r",),
    "get_training_run_by_tinker_path": (PATH,),
    "list_checkpoints": ("r",),
    "describe_run": ("r",),
    "delete_run": ("r",),
    "estimate": ("m",),
    "interpolate_checkpoints": ([PATH, PATH], [0.5, 0.5]),
    "external_weights_upload_start": ("m", types.LoraConfig(rank=4)),
    "external_weights_upload_finish": ("u",),
    "search_checkpoints": (types.CheckpointSearchRequest(),),
    "export_run_trace": ("r",),
    "get_weights_info_by_tinker_path": (PATH,),
    "get_external_weights_urls": ("tinker://r/external_weights/a",),
    "get_checkpoint_archive_url": ("r", "weights/a"),
    "get_checkpoint_archive_url_from_tinker_path": (PATH,),
    "delete_checkpoint": ("r", "weights/a"),
    "delete_checkpoint_from_tinker_path": (PATH,),
    "publish_checkpoint_from_tinker_path": (PATH,),
    "unpublish_checkpoint_from_tinker_path": (PATH,),
    "set_checkpoint_ttl_from_tinker_path": (PATH, 4000),
    "name_checkpoint": (PATH, "a"),
    "remove_checkpoint_name": ("a",),
    "get_session": ("s",),
    "assign_session_project": ("s", "p"),
    "export_session_trace": ("s",),
    "search_sessions": (types.SessionSearchRequest(),),
    "get_sampler": ("s",),
    "get_billing_usage": ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
    "disable_user": ("u",),
    "enable_user": ("u",),
    "lift_pause": ("u",),
    "set_budget": ("user", "u", 5.0),
    "remove_budget": ("user", "u"),
    "stop_user": ("u",),
    "stop_session": ("s",),
    "stop_run": ("r",),
}
WITHOUT = {
    # They send nothing, or what they send is not the caller's.
    *("get_console_url", "get_telemetry", "create_rest_client", "close", "with_recovery"),
    *("on_queue_state_change", "whoami", "get_sampler_handle", "from_sampler_handle", "create"),
}
ELSEWHERE = {
    # Sent in two steps, in a thread or as a stream, and tried below or not at all.
    *("forward_backward_custom", "forward_backward_regularized", "create_custom_loss", "stream"),
    *("openai_options", "get_server_address", "get_base_model"),
    *("iter_training_runs", "iter_user_checkpoints"),
    # `forward_backward` with a teacher, which the server of these tests has not.
    "forward_backward_reverse_kl",
}
CLIENTS = (
    tinkex.ServiceClient,
    tinkex.TrainingClient,
    tinkex.SamplingClient,
    tinkex.RestClient,
    tinkex.AdminClient,
)


def methods(owner: type) -> dict[str, Any]:
    found = {name: inspect.getattr_static(owner, name) for name in dir(owner)}
    return {
        name: getattr(value, "__func__", value)
        for name, value in found.items()
        if not name.startswith("_") and inspect.isfunction(getattr(value, "__func__", value))
    }


class Wire:
    """Between client and server: remembers each request, and can fail all of them."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Mapping[str, str], float]] = []
        self.fails = self.fails_samples = False
        self.server = Server(flags={"create_model_via_load_weights": True}, compute_s=0.0)
        self._network = Network(self.server, random.Random(0), rate=0.0)

    def make_backend(self, config: ClientConfig) -> Any:
        inside, wire = self._network.make_backend(config), self

        class Backend:
            async def send(self, method: str, url: str, headers: Any, *rest: Any) -> Reply:
                is_call = "heartbeat" not in url and "retrieve_future" not in url
                if is_call and "dynamic_config" not in url:
                    wire.sent.append((url, dict(headers), rest[-1]))
                    if wire.fails or (wire.fails_samples and "/asample" in url):
                        return json_reply({"detail": "down"}, 503)
                return await inside.send(method, url, headers, *rest)

            async def close(self) -> None:
                await inside.close()

        return Backend()


@asynccontextmanager
async def clients(wire: Wire) -> AsyncIterator[dict[type, Any]]:
    config = ClientConfig(
        base_url="http://options.test", api_key="tml-k", telemetry=False, project_id="p"
    )
    service = tinkex.ServiceClient(config=config)
    service._holder = Holder(config, make_backend=wire.make_backend)
    training = await service.create_lora_training_client("m", rank=4)
    sampler = await service.create_sampling_client(*ARGUMENTS["create_sampling_client"])
    rest, admin = tinkex.RestClient(service.holder), tinkex.AdminClient(service.holder)
    yield dict(zip(CLIENTS, (service, training, sampler, rest, admin), strict=True))
    wire.fails = False
    await service.close("success")


@pytest.mark.filterwarnings("ignore:RestClient")
@pytest.mark.parametrize("owner", CLIENTS)
def test_every_call_takes_options_and_sends_them(owner: type) -> None:
    async def main() -> list[str]:
        wrong = []
        wire = Wire()
        async with clients(wire) as made:
            for name, method in methods(owner).items():
                twin = name.removesuffix("_async").removesuffix("_sync")
                if twin in WITHOUT:
                    continue
                if "options" not in inspect.signature(method).parameters:
                    wrong.append(f"{name} takes no options")
                elif name == twin and name not in ELSEWHERE:
                    wrong += await tried(made[owner], name, wire)
        return wrong

    wrong = run_virtual(main())
    assert not wrong, "\n".join(wrong)


async def tried(client: Any, name: str, wire: Wire) -> list[str]:
    options = tinkex.RequestOptions(
        headers={"x-api-key": "tml-mine"},
        timeout=7,
        max_retries=0,
        idempotency_key=name,
        params={"traced": True},
    )
    wire.fails, wire.sent = True, []
    try:
        given = ARGUMENTS.get(name, ())
        if (type(client), name) == (tinkex.RestClient, "copy_weights"):
            given = (*given, "p")
        if (type(client), name) == (tinkex.AdminClient, "list_budgets"):
            given = ("u",)
        call = getattr(client, name)(*given, options=options)
        await (asyncio.wrap_future(call) if not hasattr(call, "__await__") else call)
    except TinkerError:
        pass
    wire.fails = False
    if not wire.sent:
        return [f"{name} sent nothing"]
    wrong = [f"{name} was sent again"] * (len({url for url, _, _ in wire.sent}) < len(wire.sent))
    for url, headers, timeout_s in wire.sent:
        key = headers.get("X-Idempotency-Key", "")
        if (headers["X-API-Key"], timeout_s, key.startswith(name)) != ("tml-mine", 7, True):
            wrong.append(f"{name}: {headers['X-API-Key']}, {timeout_s} s, key {key!r} to {url}")
        if "traced=true" not in url:
            wrong.append(f"{name}: no parameter in {url}")
    return wrong


def test_the_chunks_of_a_call_and_its_second_half_have_keys_of_their_own() -> None:
    async def main() -> list[str]:
        wire = Wire()
        wire.server.flags["fwdbwd_max_chunk_len"] = 1
        async with clients(wire) as made:
            wire.sent = []
            batch = [datum([1, 2, 3]), datum([3, 2, 1])]
            options = {"idempotency_key": "mine"}
            training = made[tinkex.TrainingClient]
            await training.train_step(batch, "cross_entropy", types.AdamParams(), options=options)
        return sorted(headers["X-Idempotency-Key"] for _, headers, _ in wire.sent[:3])

    assert run_virtual(main()) == ["mine", "mine-2", "mine-step"]


async def sampled(wire: Wire, options: Any) -> list[str]:
    """The keys of the requests that one sample is made of."""
    async with clients(wire) as made:
        wire.sent = []
        with contextlib.suppress(TinkerError):
            await made[tinkex.SamplingClient].sample(PROMPT, 1, PARAMS, options=options)
        return [h["X-Idempotency-Key"] for url, h, _ in wire.sent if "/asample" in url]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_sample_that_cannot_be_submitted_is_tried_as_often_as_any_call(most: int) -> None:
    async def main() -> list[str]:
        wire = Wire()
        wire.fails_samples = True
        return await sampled(wire, {"max_retries": most})

    assert len(run_virtual(main())) == most + 1


def test_a_sample_that_is_made_anew_has_a_key_of_its_own() -> None:
    async def main() -> list[str]:
        wire = Wire()
        wire.server.lose_samples = {0}
        return await sampled(wire, {"idempotency_key": "mine"})

    assert run_virtual(main()) == ["mine", "mine-2"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"time_out": 1}, "options.time_out: there is no such option; did you mean timeout"),
        ({"max_retries": -1}, "options.max_retries: must be a whole number from 0, got -1"),
        ({"max_retries": True}, "options.max_retries"),
        ({"timeout": 0}, "options.timeout: must be a number of seconds above 0, got 0"),
        ({"timeout": "1"}, "options.timeout"),
        ({"idempotency_key": "a\nb"}, "options.idempotency_key"),
        ({"headers": None}, "options.headers: must be a dict, got None"),
        ({"params": "a=b"}, "options.params"),
        ([("timeout", 1)], "options: expected RequestOptions"),
    ],
)
def test_wrong_options_are_refused_where_the_call_is_made(options: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        Call("GET", "x").having(options)
    with pytest.raises(ConfigError, match="content-length"):
        Call("GET", "x").having({"headers": {"content-length": "1"}})


def test_options_take_a_timeout_of_httpx_and_win_over_the_clients_headers() -> None:
    call = Call("GET", "x", timeout_s=9.0).having({"timeout": tinkex.Timeout(3.0)})
    assert call.timeout_s == 3.0
    assert Call("GET", "x", timeout_s=9.0).having({}).timeout_s == 9.0


def test_result_right_behind_a_call_limits_the_call(toy_server: str) -> None:
    """Of the calls that make a client, too, outside an event loop."""
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
    slow = tinkex.ServiceClient(base_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    with pytest.raises(ResultTimeoutError):
        slow.create_lora_training_client("m").result(timeout=0.5)
    with pytest.raises(ResultTimeoutError):
        slow.get_server_capabilities().result(timeout=0.5)
    # The same where the future has a name, by which it is asked.
    sampler = slow.create_sampling_client(base_model="m")
    asked = slow.get_server_capabilities()
    with pytest.raises(ResultTimeoutError):
        sampler.result(timeout=0.5)
    with pytest.raises(ResultTimeoutError):
        asked.result(timeout=0.5)
    slow.close().result(60)
    silent.close()
    # Without it an error is raised where the call is made, as programs of older SDKs expect.
    with pytest.raises(tinkex.TinkerError):
        tinkex.ServiceClient(base_url=toy_server).create_training_client_from_state(PATH)
    client, service = None, tinkex.ServiceClient(base_url=toy_server)
    with pytest.raises(tinkex.TinkerError):
        client = service.create_training_client_from_state(PATH)
    assert client is None


def doubled(logprobs: Any, weights: Any) -> Any:
    return -2.0 * (logprobs * weights).sum(), {}


class OfTwoSteps(Server):
    """A server whose clients are made in several requests: 5.8, and sessions made by path."""

    def on_weights_info(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return json_reply({"base_model": "m", "is_lora": True, "lora_rank": 4})

    def on_load_weights(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return self._promise("load", {"path": PATH})

    def on_save_weights_for_sampler(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return self._promise("save", {"path": "tinker://S:train:0/sampler_weights/a"})


@pytest.mark.parametrize(
    ("name", "given", "paths"),
    [
        (
            "create_training_client_from_state_with_optimizer",
            {"path": PATH, "continues_at": 3},
            ["weights_info", "create_model", "load_weights", "runs/S:train:1"],
        ),
        (
            "save_weights_and_get_sampling_client",
            {},
            ["save_weights_for_sampler", "create_sampling_session"],
        ),
    ],
)
def test_each_request_of_a_call_of_several_has_its_options_and_one_its_key(
    name: str, given: dict[str, Any], paths: list[str]
) -> None:
    async def main() -> list[tuple[str, str, float, bool]]:
        wire = Wire()
        wire.server = wire._network.server = OfTwoSteps(compute_s=0.0)
        async with clients(wire) as made:
            wire.sent = []
            owner = next(each for each in made.values() if hasattr(each, name))
            options = {"headers": {"X-Trace": "7"}, "timeout": 7, "idempotency_key": "mine"}
            await getattr(owner, name)(**given, options=options)
            return [
                (
                    url.partition("/v1/")[2],
                    headers.get("X-Trace", ""),
                    timeout_s,
                    headers.get("X-Idempotency-Key") == "mine",
                )
                for url, headers, timeout_s in wire.sent
            ]

    sent = run_virtual(main())
    assert [(path, trace, timeout_s) for path, trace, timeout_s, _ in sent] == [
        (path, "7", 7) for path in paths
    ]
    assert sum(is_named for *_, is_named in sent) == 1


def minus_sum(data: Any, logprobs: Any) -> Any:
    return -sum(each.sum() for each in logprobs), {}


def test_calls_that_wait_send_their_options_in_every_request_too(
    tmp_path: Path, start_server: Callable[..., AbstractContextManager[str]]
) -> None:
    """Custom losses of two passes, texts, listings of a page, the call that is made in a thread."""
    sent: list[Call] = []

    async def spy(call: Call, **given: Any) -> Reply:
        if "heartbeat" not in call.path and "dynamic_config" not in call.path:
            sent.append(call)
        return await Transport.exchange(transport, call, **given)

    options = {"headers": {"X-Trace": "7"}, "timeout": 7, "idempotency_key": "mine"}
    penalty = RegularizerSpec(L2(center="mean", reduction="mean"), 1.0, "spread")
    with (
        start_server(tmp_path, "--engine", "toy") as base_url,
        tinkex.ServiceClient(base_url=base_url, api_key="tml-two") as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=4).result()
        training.save_state("a").result()
        sampler = service.create_sampling_client(base_model=MODEL).result()
        sampler._base_model_name = None
        rest, data = service.create_rest_client().result(), [BATCH[0][0]]
        transport = service.holder.transport
        transport.exchange = spy
        for call, num_requests in (
            (lambda: training.forward_backward_custom(data, minus_sum, options=options), 2),
            (
                lambda: training.forward_backward_regularized(
                    data, minus_sum, [penalty], options=options
                ),
                2,
            ),
            (lambda: sampler.get_base_model(options=options), 1),
            (lambda: list(rest.iter_training_runs(options=options)), 1),
            (lambda: list(rest.iter_user_checkpoints(options=options)), 1),
            (lambda: service.get_server_address(options=options), 1),
            (lambda: service.openai_options(options=options), 1),
        ):
            sent.clear()
            done: Any = call()
            if isinstance(done, tinkex.APIFuture):
                done.result()
            assert [(each.own_headers, each.timeout_s) for each in sent] == [
                ({"X-Trace": "7"}, 7)
            ] * num_requests
            assert [each.idempotency_key for each in sent][-1:] == ["mine"]
            assert [each.idempotency_key for each in sent].count("mine") == 1


def unopened(wire: Wire) -> tinkex.ServiceClient:
    config = ClientConfig(base_url="http://first.test", api_key="tml-k", telemetry=False)
    service = tinkex.ServiceClient(config=config)
    service._holder = Holder(config, make_backend=wire.make_backend)
    return service


def test_the_options_of_the_first_call_hold_for_the_session_that_it_opens() -> None:
    async def main() -> None:
        wire = Wire()
        service, wire.fails = unopened(wire), True
        for call in (
            lambda options: service.create_lora_training_client("m", options=options),
            lambda options: service.get_server_capabilities(options=options),
            lambda options: service.interpolate_checkpoints(
                [PATH, PATH], [0.5, 0.5], options=options
            ),
            lambda options: service.create_custom_loss(
                doubled, {"logprobs": 1, "weights": 1}, options=options
            ),
        ):
            wire.sent = []
            with pytest.raises(tinkex.InternalServerError):
                await call({"max_retries": 0, "timeout": 3})
            assert [(url, timeout_s) for url, _, timeout_s in wire.sent] == [
                ("http://first.test/api/v1/client/config", 3)
            ]
        with pytest.raises(InvalidInputError, match="time_out"):
            await service.create_lora_training_client("m", options={"time_out": 3})
        wire.fails = False
        await service.create_lora_training_client("m")
        await service.close("success")

    run_virtual(main())


def test_a_client_without_retries_fails_at_once_and_waits_as_long_as_it_says() -> None:
    async def main() -> None:
        wire = Wire()
        service = tinkex.ServiceClient(
            base_url="http://first.test", api_key="tml-k", timeout=7, max_retries=0
        )
        service._holder = Holder(service.config, make_backend=wire.make_backend)
        training = await service.create_lora_training_client("m")
        wire.fails, wire.sent = True, []
        for call in (training.get_info, training.unload_model, service.get_server_capabilities):
            with pytest.raises(tinkex.InternalServerError):
                await call()
        assert [timeout_s for *_, timeout_s in wire.sent] == [7.0] * 3
        wire.fails = False
        await service.close("success")

    run_virtual(main())


def test_a_patient_call_waits_on_where_another_that_came_first_gave_up() -> None:
    async def main() -> None:
        wire = Wire()
        service, wire.fails = unopened(wire), True
        hasty = asyncio.ensure_future(
            service.create_lora_training_client("m", options={"max_retries": 0}).coroutine()
        )
        patient = asyncio.ensure_future(service.create_lora_training_client("m").coroutine())
        with pytest.raises(tinkex.InternalServerError):
            await hasty
        wire.fails = False
        assert (await patient).model_id
        await service.close("success")

    run_virtual(main())


@pytest.mark.parametrize("is_async", [False, True])
def test_listings_are_read_page_by_page_with_for_and_with_async_for(is_async: bool) -> None:
    pages = [["a", "b"], ["c"]]

    class Page:
        def __init__(self, offset: int) -> None:
            self.rows = pages[0] if offset == 0 else pages[1]
            self.cursor = types.Cursor(offset=offset, limit=2, total_count=3)

    def page_at(offset: int) -> Any:
        future: Any = tinkex.APIFuture()
        future.set_result(Page(offset))
        return future

    from tinkex.client.rest.paged import Paged

    async def read() -> list[str]:
        return [row async for row in Paged[str](page_at, "rows")]

    found = asyncio.run(read()) if is_async else list(Paged[str](page_at, "rows"))
    assert found == ["a", "b", "c"]

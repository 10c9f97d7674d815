"""Each field of each request made wrong: the caller's fault, one error body, and life goes on.

schemathesis reads the OpenAPI document and makes valid and invalid bodies for every JSON call; the
protobuf body is mutated by hand.
"""

from __future__ import annotations

import asyncio
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
import zstandard
from app_world import AppWorld, open_app
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from wire_client import PROTO, loss_of, train_body

from tinkex.wire import tinker_public_pb2 as pb
from tinkex.wire.endpoints import ENDPOINTS

FUZZ = Path(__file__).parents[1] / "wire" / "fuzz.py"
FEW, MANY = 2, 100
TOKENS = [1, 2, 3, 4]


def check_answer(status: int, headers: Any, body: bytes, label: str) -> None:
    assert status < 500, f"{label}: {status} {body[:500]!r}"
    if status >= 400:
        assert int(headers["content-length"]) > 0
        assert b'"detail"' in body
        assert "content-encoding" not in headers


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("num_cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_json_request_makes_the_server_fail(
    tmp_path: Path, mode: GenerationMode, num_cases: int
) -> None:
    with asyncio.Runner() as runner:
        opened = open_app(tmp_path, hold_s=0.05)
        world = runner.run(opened.__aenter__())
        model = runner.run(world.model())
        known = {
            "model_id": model,
            "session_id": model.split(":")[0],
            "base_model": "toy",
            "request_id": f"{model}:0",
        }
        schema = schemathesis.openapi.from_dict(world.app.openapi())
        found = [operation.ok() for operation in schema.get_all_operations()]
        with_body = {(row.method, row.path) for row in ENDPOINTS.values() if row.request}
        ours = [item for item in found if (item.method.upper(), item.path) in with_body]
        assert len(ours) == len(with_body)
        for operation in ours:
            _hammer(runner, world, operation, mode, num_cases, known)
        loss = runner.run(_still_works(world))
        assert loss > 0
        runner.run(opened.__aexit__(None, None, None))


def _hammer(
    runner: asyncio.Runner,
    world: AppWorld,
    operation: Any,
    mode: GenerationMode,
    num_cases: int,
    known: dict[str, str],
) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    def send(case: Case) -> None:
        runner.run(_send(world, case, known))

    try:
        send()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE


async def _send(world: AppWorld, case: Case, known: dict[str, str]) -> None:
    """Send a case as it is, and once more with ids that exist, so that it gets past the door."""
    request = case.as_transport_kwargs(base_url="http://localhost")
    body = request.get("json")
    bodies = [body]
    if isinstance(body, dict):
        bodies.append(body | {name: value for name, value in known.items() if name in body})
    for each in bodies:
        answer = await world.http.request(
            request["method"],
            request["url"],
            json=each,
            content=request.get("data"),
            headers={"x-api-key": "tml-test"},
        )
        check_answer(answer.status_code, answer.headers, answer.content, f"{case.path} {each!r}")


async def _still_works(world: AppWorld) -> float:
    model = await world.model()
    return loss_of(await world.result((await world.train(model, 1, TOKENS)).json()))


# ------------------------------------------------------------------------------------ protobuf


def _mutations() -> dict[str, Callable[[Any], None]]:
    def tensor(name: str, **fields: Any) -> Callable[[Any], None]:
        def change(message: Any) -> None:
            target = message.data[0].loss_fn_inputs[name]
            for field, value in fields.items():
                if field == "shape":
                    del target.shape[:]
                    target.shape.extend(value)
                else:
                    setattr(target, field, value)

        return change

    def sparse(message: Any) -> None:
        target = message.data[0].loss_fn_inputs["weights"]
        target.sparse_csr.values = b"\0" * 4
        target.sparse_csr.crow_indices = np.array([0, 9], dtype="<i8").tobytes()
        target.sparse_csr.col_indices = np.array([7], dtype="<i8").tobytes()

    def image(message: Any) -> None:
        message.data[0].model_input.add().image.data = b"png"

    def audio(message: Any) -> None:
        message.data[0].model_input.add().dmel.dmel = b"dmel"

    def tokens(value: bytes) -> Callable[[Any], None]:
        return lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", value)

    return {
        "no datums": lambda m: m.ClearField("data"),
        "no tokens": tokens(b""),
        "half a token": tokens(b"\0\0\0"),
        "token outside the vocabulary": tokens(np.array([10**6] * 4, dtype="<i4").tobytes()),
        "negative token": tokens(np.array([-1] * 4, dtype="<i4").tobytes()),
        "too long": tokens(np.zeros(40_000, dtype="<i4").tobytes()),
        "image": image,
        "audio": audio,
        "empty chunk": lambda m: m.data[0].model_input.add(),
        "unknown loss": lambda m: setattr(m, "loss_fn", "mse"),
        "stable_reinforce": lambda m: setattr(m, "loss_fn", "stable_reinforce"),
        "custom without id": lambda m: setattr(m, "loss_fn", "custom"),
        "loss without its inputs": lambda m: setattr(m, "loss_fn", "ppo"),
        "unknown setting": lambda m: m.loss_fn_config.update({"beta": 1.0}),
        "setting without value": lambda m: m.loss_fn_config_v2["x"],
        "no target": lambda m: m.data[0].loss_fn_inputs.pop("target_tokens"),
        "no weights": lambda m: m.data[0].loss_fn_inputs.pop("weights"),
        "stray input": lambda m: m.data[0].loss_fn_inputs["other"],
        "nan weight": tensor("weights", dense=np.full(4, np.nan, dtype="<f4").tobytes()),
        "infinite weight": tensor("weights", dense=np.full(4, np.inf, dtype="<f4").tobytes()),
        "short weights": tensor("weights", dense=np.ones(3, dtype="<f4").tobytes(), shape=[3]),
        "wrong shape": tensor("weights", shape=[2, 3]),
        "negative shape": tensor("weights", shape=[-4]),
        "huge shape": tensor("weights", shape=[2**40, 2**40]),
        "half a float": tensor("weights", dense=b"\0\0\0"),
        "no dtype": tensor("weights", dtype=pb.DTYPE_UNSPECIFIED),
        "bfloat16": tensor("weights", dtype=pb.DTYPE_BFLOAT16),
        "float target": tensor("target_tokens", dtype=pb.DTYPE_FLOAT32, shape=[8]),
        "sparse nonsense": sparse,
    }


async def test_a_wrong_protobuf_body_is_refused_by_name(app_world: AppWorld) -> None:
    await app_world.facts()
    for name, mutate in _mutations().items():
        model = await app_world.model()
        message = pb.ForwardBackwardRequest.FromString(train_body(model, 1, TOKENS))
        mutate(message)
        body = message.SerializeToString()
        answer = await app_world.post("forward_backward", body, headers=PROTO)
        assert answer.status_code == 400, f"{name}: {answer.text}"
        check_answer(answer.status_code, answer.headers, answer.content, name)
        done = (await app_world.train(model, 2, TOKENS)).json()
        loss = loss_of(await app_world.result(done))
        assert loss > 0, f"{name}: the stream goes on after the mistake"


async def test_random_bytes_are_never_a_server_error(app_world: AppWorld) -> None:
    chance = random.Random(0)
    model = await app_world.model()
    good = train_body(model, 1, TOKENS)
    for _ in range(300):
        body = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        cut = bytes(body[: chance.randint(0, len(body))])
        answer = await app_world.post("forward_backward", cut, headers=PROTO)
        check_answer(answer.status_code, answer.headers, answer.content, repr(cut))
    assert await _still_works(app_world) > 0


async def test_compressed_bodies_are_read_and_bombs_refused(tmp_path: Path) -> None:
    async with open_app(tmp_path, max_body_bytes=100_000) as world:
        model = await world.model()
        zstd = {**PROTO, "content-encoding": "zstd"}
        body = zstandard.compress(train_body(model, 1, TOKENS))
        done = await world.ok("forward_backward", body, headers=zstd)
        assert loss_of(await world.result(done)) > 0
        bomb = zstandard.compress(b"\0" * 50_000_000)
        assert len(bomb) < 10_000
        assert (await world.post("forward_backward", bomb, headers=zstd)).status_code == 413
        broken = await world.post("forward_backward", b"no zstd", headers=zstd)
        assert broken.status_code == 400
        plain = await world.post("forward_backward", b"\0" * 200_000, headers=PROTO)
        assert plain.status_code == 413
        large = {"tinker_path": "x" * 200_000}
        assert (await world.post("weights_info", large)).status_code in (400, 413)
        gzip = {**PROTO, "content-encoding": "gzip"}
        assert (await world.post("forward_backward", b"x", headers=gzip)).status_code == 415


@pytest.mark.parametrize("level", [1, 3, 19, 22])
async def test_zstd_windows_of_real_clients_are_read_and_larger_ones_refused(
    app_world: AppWorld, level: int
) -> None:
    """Level 19 has a window of 8 MiB; 22 would cost 128 MiB before a byte is checked."""
    model = await app_world.model()
    packer = zstandard.ZstdCompressor(level=level).compressobj()  # no size, so the full window
    body = packer.compress(train_body(model, 1, TOKENS)) + packer.flush()
    zstd = {**PROTO, "content-encoding": "zstd"}
    answer = await app_world.post("forward_backward", body, headers=zstd)
    if level <= 19:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert "window of the body is larger than 8 MiB" in answer.json()["detail"]


def test_a_frame_that_asks_for_a_large_window_gets_no_memory(tmp_path: Path) -> None:
    extra_mib = runpy.run_path(str(FUZZ))["extra_mib"]
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    frame = b"".join([packer.compress(bytes(2**24)) for _ in range(6)]) + packer.flush()
    assert len(frame) < 2**15
    with asyncio.Runner() as runner:
        opened = open_app(tmp_path)
        world = runner.run(opened.__aenter__())
        headers = {**PROTO, "content-encoding": "zstd"}
        answers = []

        def send() -> None:
            post = world.post("forward_backward", frame, headers=headers)
            answers.append(runner.run(post))

        send()  # what a first request loads is not the frame's doing
        grown_mib = extra_mib(lambda: [send() for _ in range(4)])
        runner.run(opened.__aexit__(None, None, None))
    assert {answer.status_code for answer in answers} == {400}
    assert "without long-distance matching" in answers[-1].json()["detail"]
    assert grown_mib < 8
    assert zstandard.get_frame_parameters(frame).window_size == 2**27


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("optimizer_config", {"type": "dimuon", "version": 1}, "use adamw"),
        ("lora_config", {"rank": 0}, "rank"),
        (
            "lora_config",
            {"rank": 8, "train_attn": False, "train_mlp": False, "train_unembed": False},
            "at least one",
        ),
        ("lora_config", {"rank": "8"}, "rank"),
        ("lora_config", {"rank": 8, "dropout": 0.1}, "dropout"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    app_world: AppWorld, field: str, value: Any, says: str
) -> None:
    body = {"session_id": await app_world.session(), "base_model": "toy", field: value}
    answer = await app_world.post("create_model", body)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]


async def test_unknown_base_models_are_refused_with_the_list(tmp_path: Path) -> None:
    async with open_app(tmp_path, models=("toy",), aliases={"Qwen/Qwen3-8B": "toy"}) as world:
        session = await world.session()
        body = {"session_id": session, "base_model": "nowhere/model"}
        answer = await world.post("create_model", body)
        assert answer.status_code == 400
        assert "Qwen/Qwen3-8B" in answer.json()["detail"]
        made = await world.ok("create_model", body | {"base_model": "Qwen/Qwen3-8B"})
        assert (await world.result(made))["model_id"]
        info = await world.ok("get_info", {"model_id": f"{session}:train:0"})
        assert info["model_name"] == "Qwen/Qwen3-8B"

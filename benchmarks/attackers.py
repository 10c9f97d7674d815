"""What one hostile key, or strangers without any, send to a server: one function for each attack.

Each lasts until a moment and gives up nothing: whatever is answered, it sends again. They are run
beside a polite key by `abuse.py`, and beside tenants while processes are killed by `soak.py`. To
add one, write a function and give it a row in `ATTACKS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import safetensors.numpy
import zstandard

ROOT = Path(__file__).resolve().parent.parent
for _folder in ("server", "security"):
    sys.path.insert(0, str(ROOT / "tests" / _folder))
import heavy_bodies  # noqa: E402
import hostile_tar  # noqa: E402
from raw_http import Connection  # noqa: E402

HOSTILE = "tml-hostile"


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    key: str = HOSTILE
    shared_path: str = ""
    """A checkpoint of somebody else that is public; empty: there is none."""

    def connect(self) -> Connection:
        return Connection(self.port, self.key)


Attack = Callable[[Target, float], Awaitable[None]]


async def post(connection: Connection, path: str, body: Any) -> dict[str, Any]:
    status, content = await connection.post(path, body)
    if status not in (200, 408):
        raise RuntimeError(f"{path}: {status} {content[:200]!r}")
    return dict(orjson.loads(content)) if status == 200 else {}


async def open_sampler(connection: Connection, **weights: str) -> tuple[str, str]:
    """A session and a sampler in it, of the base model or of the weights given."""
    made = await post(connection, "create_session", {"tags": [], "sdk_version": "abuse"})
    session = str(made["session_id"])
    asked = {"session_id": session, "sampling_session_seq_id": 0}
    asked |= weights or {"base_model": "toy"}
    sampler = await post(connection, "create_sampling_session", asked)
    return session, str(sampler["sampling_session_id"])


async def open_model(connection: Connection) -> tuple[str, str]:
    made = await post(connection, "create_session", {"tags": [], "sdk_version": "abuse"})
    session = str(made["session_id"])
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "toy",
        "lora_config": {"rank": 4, "seed": 7},
        "optimizer_config": {"type": "adamw"},
    }
    promise = await post(connection, "create_model", body)
    return session, str(orjson.loads(await connection.settled(promise))["model_id"])


def sample_body(
    sampler: str,
    seq_id: int,
    *,
    num_samples: int,
    max_tokens: int,
    prompt: list[int] | None = None,
    **params: Any,
) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt or [1, 2, 3]}]},
        "sampling_params": {"max_tokens": max_tokens, "stop": [], **params},
        "num_samples": num_samples,
    }


async def repeat(until: float, work: Callable[[], Awaitable[Any]]) -> None:
    """Whatever the answer, again."""
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            await work()
        await asyncio.sleep(0)


async def all_until(until: float, works: list[Awaitable[None]]) -> None:
    """Run all of them, and cut off those that wait for an answer longer than this lasts."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.sleep(max(until - time.monotonic(), 0))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------ queues


async def flood_queues(target: Target, until: float) -> None:
    """Long samples that nobody fetches; large telemetry, searches and training bodies."""
    _, sampler = await open_sampler(target.connect())
    number = 0

    async def flood(connection: Connection) -> None:
        nonlocal number
        number += 1
        body = sample_body(sampler, number, num_samples=64, max_tokens=400)
        status, _ = await connection.post("asample", body)
        if status == 429:
            await asyncio.sleep(0.2)

    telemetry = zstandard.compress(orjson.dumps({"events": [{}] * 200_000, "session_id": "x"}))
    words = orjson.dumps({"display_name": " ".join(f"w{n}" for n in range(30_000))})
    lists = b'{"model_id": [' + b"[]," * 2_000_000 + b"[]]}"
    works = [repeat(until, partial(flood, target.connect())) for _ in range(16)]
    for path, body in (
        ("telemetry", telemetry),
        ("sessions/search", words),
        ("forward_backward", lists),
        ("create_session", orjson.dumps({"display_name": "x" * 900_000})),
    ):
        for _ in range(2):
            works.append(repeat(until, partial(target.connect().post, path, body)))
    await all_until(until, works)


# ------------------------------------------------------------------------------------ /v1


def foreign_bodies() -> list[tuple[str, int, bytes]]:
    """Paths of `/v1`, how many connections send to each, and what: beyond the bounds and below."""
    toy, user = {"model": "toy"}, {"role": "user", "content": "hi"}
    calling = user | {"tool_calls": [{"function": {"name": "f"}}] * 990}
    keys = {f"k{n}": 0 for n in range(490_000)}
    chat, wide = "/v1/chat/completions", "x" * 15_000_000 + "\U0001f600"
    options = {"reasoning_effort": [0] * 1_000_000}
    bodies: list[tuple[str, int, dict[str, Any]]] = [
        (chat, 60, toy | {"messages": [calling] * 121}),
        (chat, 40, toy | {"messages": [calling] * 10}),
        (chat, 8, toy | {"messages": [user] * 9000}),
        (chat, 8, toy | {"messages": [user], "chat_template_kwargs": options}),
        (chat, 4, toy | {"messages": [user | {"content": wide}]}),
        (chat, 8, toy | {"messages": [user], **keys}),
        ("/v1/completions", 8, toy | {"prompt": ["a"] * 480_000}),
        ("/v1/completions", 8, toy | {"prompt": [5] * 1_400_000}),
        ("/v1/responses", 6, toy | {"input": [{"type": "function_call", "name": "f"}] * 10_000}),
        ("/v1/completions", 4, toy | {"prompt": ["hi"] * 1024, "max_tokens": 1}),
        (
            chat,
            4,
            toy | {"messages": [user], "logit_bias": dict.fromkeys(map(str, range(140_000)))},
        ),
        ("/api/v1/asample", 8, {"prompt": {"chunks": [{"type": "x", "tokens": [1]}] * 120_000}}),
    ]
    packed = [(path, n, zstandard.compress(orjson.dumps(body))) for path, n, body in bodies]
    rest = b'"messages": [{"role": "user", "content": "' + b"x" * 15_000_000 + b'"}]}'
    frames = zstandard.compress(b'{"model": "toy", ') + zstandard.compress(rest)
    return [*packed, (chat, 8, frames)]


async def swell_foreign_bodies(target: Target, until: float) -> None:
    """Bodies at `/v1` that are small on the wire and huge once parsed, over 170 connections."""
    works = [
        repeat(until, partial(target.connect().post, path, body, encoding="zstd"))
        for path, num_connections, body in foreign_bodies()
        for _ in range(num_connections)
    ]
    await all_until(until, works)


# ------------------------------------------------------------------------------------ imports

_WEIGHTS = "adapter_model.safetensors"


async def forge_digests(target: Target, until: float) -> None:
    """Other weights under the digest of somebody's public checkpoint, sampled beside hers."""
    if not target.shared_path:
        return
    files = await _downloaded(target)
    if weights := files.get(_WEIGHTS):  # the toy has none, and refuses what it is sent
        tensors = safetensors.numpy.load(weights)
        rng = np.random.default_rng(5)
        other = {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in tensors.items()}
        files[_WEIGHTS] = safetensors.numpy.save(other)
    body, number = hostile_tar.plain(*files.items()), 0

    async def forge(connection: Connection) -> None:
        nonlocal number
        status, content = await connection.post(
            "checkpoints/import", body, kind="application/x-tar"
        )
        if status != 200:
            await asyncio.sleep(0.1)
            return
        path = str(orjson.loads(content)["tinker_path"])
        _, sampler = await open_sampler(connection, model_path=path)
        for _ in range(20):
            number += 1
            prompt = [7 + number % 50] * 120
            asked = sample_body(sampler, number, num_samples=1, max_tokens=8, prompt=prompt)
            await connection.settled(await post(connection, "asample", asked))

    works = [repeat(until, partial(forge, target.connect())) for _ in range(2)]
    await all_until(until, works)


async def _downloaded(target: Target) -> dict[str, bytes]:
    run, rest = target.shared_path.removeprefix("tinker://").split("/", 1)
    url = f"http://127.0.0.1:{target.port}/api/v1/training_runs/{run}/checkpoints/{rest}/archive"
    headers = {"x-api-key": target.key}
    async with httpx.AsyncClient(follow_redirects=True, headers=headers) as client:
        answer = await client.get(url)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        members = [(member.name, archive.extractfile(member)) for member in archive]
        return {name: file.read() for name, file in members if file is not None}


async def slow_archives(target: Target, until: float) -> None:
    """Archives whose headers cost a reader of tar files the square of their length, and others."""
    works = []
    bodies = (
        hostile_tar.digits(200_000),
        hostile_tar.digits(5_000_000),
        hostile_tar.chained_names(3_000),
        hostile_tar.folders(20_000),
        hostile_tar.sparse("adapter_model.safetensors", 1 << 40),
    )
    for body in bodies * 2:
        send = partial(target.connect().post, "checkpoints/import", body)
        works.append(repeat(until, partial(send, kind="application/x-tar")))
    await all_until(until, works)


# ------------------------------------------------------------------------------------ training


async def swell_sparse_inputs(target: Target, until: float) -> None:
    """A few bytes that say they are gigabytes, and many that are just within what is taken."""

    async def send(connection: Connection) -> None:
        _, model = await open_model(connection)
        for seq_id in range(1, 200):
            columns = 2**27 if seq_id % 2 else 2**17
            body = heavy_bodies.sparse_request(model, seq_id, columns)
            status, _ = await connection.post("forward_backward", body)
            if status == 429:
                await asyncio.sleep(0.2)

    works = [repeat(until, partial(send, target.connect())) for _ in range(4)]
    await all_until(until, works)


async def work_in_losses(target: Target, until: float) -> None:
    """Traced losses of much work: beyond what is taken, and as much as is."""

    async def send(connection: Connection, count: int, columns: int, num_data: int) -> None:
        session, model = await open_model(connection)
        loss = {
            "session_id": session,
            "custom_loss_seq_id": 1,
            **heavy_bodies.product_loss(count, columns),
        }
        made = await connection.settled(await post(connection, "create_custom_loss", loss))
        config = {"loss_id": orjson.loads(made)["loss_id"]}
        for seq_id in range(1, 50):
            given = {
                "data": [heavy_bodies.datum()] * num_data,
                "loss_fn": "custom",
                "loss_fn_config": config,
            }
            body = {"model_id": model, "seq_id": seq_id, "forward_backward_input": given}
            status, content = await connection.post("forward_backward", body)
            if status == 200:
                await connection.settled(orjson.loads(content))
            elif status == 429:
                await asyncio.sleep(0.2)

    heavy = ((30, 8192, 256), (1, 512, 256), (3, 512, 64))
    works = [repeat(until, partial(send, target.connect(), *how)) for how in heavy * 2]
    await all_until(until, works)


# ------------------------------------------------------------------------------------ disk


def empty_tensors(count: int) -> bytes:
    """A safetensors file of nothing but names."""
    about = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = ",".join(f'"base_model.model.m{n}.lora_A.weight":{about}' for n in range(count))
    header = f"{{{names}}}".encode()
    return len(header).to_bytes(8, "little") + header


def idle_loss(num_steps: int) -> dict[str, Any]:
    """A traced loss of many steps that come to nothing."""
    place = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    call = {"op": "call_function", "target": "torch.sum", "args": [{"ref": "logprobs"}]}
    steps = [call | {"name": f"step_{n}"} for n in range(num_steps)]
    results = [{"tuple": [{"ref": "step_0"}, {"dict": {}}]}]
    output = {"op": "output", "name": "output", "target": "output", "args": results}
    graph = {"format": 1, "nodes": [place, *steps, output]}
    return {"name": "idle", "inputs": [{"name": "logprobs", "rank": 2}], "graph": graph}


async def fill_the_disk(target: Target, until: float) -> None:
    """Traced losses, unnamed weights, saves that wait together, and imports of 300,000 names."""
    config = orjson.dumps({"r": 8, "base_model_name_or_path": "toy"})
    weights = ("adapter_model.safetensors", empty_tensors(300_000))
    archive = hostile_tar.plain(("adapter_config.json", config), weights)

    async def trace(connection: Connection) -> None:
        session, _ = await open_model(connection)
        for number in range(200):
            body = {"session_id": session, "custom_loss_seq_id": number, **idle_loss(1000)}
            packed = zstandard.compress(orjson.dumps(body))
            await connection.post("create_custom_loss", packed, encoding="zstd")

    async def save(connection: Connection, *, named: bool) -> None:
        _, model = await open_model(connection)
        for number in range(1, 60):
            names = {"path": f"s{number}"} if named else {"sampling_session_seq_id": number}
            body = {"model_id": model, "seq_id": number, **names}
            await connection.post("save_weights_for_sampler", body)

    works = [partial(trace, target.connect()) for _ in range(2)]
    works += [partial(save, target.connect(), named=named) for named in (True, False)]
    kind = {"kind": "application/x-tar"}
    works.append(partial(target.connect().post, "checkpoints/import", archive, **kind))
    await all_until(until, [repeat(until, work) for work in works])


# ------------------------------------------------------------------------------------ connections


def head_of(target: Target, path: str, size: int) -> bytes:
    return (
        f"POST /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {target.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    ).encode()


async def large_result(connection: Connection) -> str:
    """The id of a request whose result has two megabytes, ten in JSON."""
    _, model = await open_model(connection)
    tokens = [n % 200 for n in range(3000)]
    tensor = {"dtype": "float32", "shape": [len(tokens)]}
    inputs = {
        "target_tokens": tensor | {"data": tokens, "dtype": "int64"},
        "weights": tensor | {"data": [1.0] * len(tokens)},
    }
    chunks = [{"type": "encoded_text", "tokens": tokens}]
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
    given = {"data": [datum] * 160, "loss_fn": "cross_entropy"}
    body = {"model_id": model, "seq_id": 1, "forward_input": given}
    return str((await post(connection, "forward", body))["request_id"])


async def hold_connections(target: Target, until: float) -> None:
    """Refused bodies whose connections stay, answers that nobody reads, heads by the thousand."""
    refused = hostile_tar.digits(5_000_000)
    poll = orjson.dumps({"request_id": await large_result(target.connect())})
    held: list[asyncio.StreamWriter] = []

    async def send(content: bytes) -> None:
        """Send on a new connection, which stays open until five hundred others are."""
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1000)
        held.append(writer)
        writer.write(content)
        await writer.drain()
        if len(held) > 500:
            held.pop(0).transport.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(100), 5)

    imported = head_of(target, "checkpoints/import", len(refused)) + refused
    polled = head_of(target, "retrieve_future", len(poll)) + poll
    bodies = (imported, polled, polled + b"GET / HTTP/1.1\r\na: b\r\n\r\n" * 10_000)
    await all_until(until, [repeat(until, partial(send, body)) for body in bodies * 8])
    for writer in held:
        writer.transport.abort()


# ------------------------------------------------------------------------------------ pages


async def ask_for_all_points(target: Target, until: float) -> None:
    """Runs of a thousand long curves, and pages, files and traces that show all of them."""
    _, model = await open_model(target.connect())
    names = [f"metric-{n}" for n in range(980)]
    steps = iter(range(1_000_000))

    async def log(connection: Connection) -> None:
        step = next(steps)
        for first in range(0, len(names), 200):
            metrics = dict.fromkeys(names[first : first + 200], step + 0.123456789)
            body = {"model_id": model, "metrics": metrics, "step": step}
            await connection.post("log_metrics", body)

    async def look(client: httpx.AsyncClient, path: str) -> None:
        answer = await client.get(path)
        if path.endswith("trace_export"):
            await client.get(answer.json()["url"])

    # One for all: each would read all certificates when it is made, in the polite key's loop.
    base, headers = f"http://127.0.0.1:{target.port}", {"x-api-key": target.key}
    client = httpx.AsyncClient(base_url=base, headers=headers, timeout=30, trust_env=False)
    works = [repeat(until, partial(log, target.connect())) for _ in range(4)]
    for path in (
        f"/console/api/compare?runs={model}",
        f"/console/api/curves?runs={model}",
        f"/console/api/runs/{model}",
        f"/console/runs/{model}/metrics.csv",
        f"/api/v1/training_runs/{model}/trace_export",
        "/api/v1/training_runs?limit=1000",
    ):
        works += [repeat(until, partial(look, client, path)) for _ in range(6)]
    await all_until(until, works)
    await client.aclose()


# ------------------------------------------------------------------------------------ strangers


async def knock_without_a_key(target: Target, until: float) -> None:
    """Connections, heads without end and bodies that are not read."""
    port = target.port

    async def head_without_end() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 1_000_000)
            await writer.drain()
            await asyncio.wait_for(reader.read(100), 2)
        finally:
            writer.close()

    async def body_without_key() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(
                b"POST /api/v1/sessions/search HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: text/plain\r\ncontent-length: 2500000000\r\n\r\n"
            )
            for _ in range(50):
                writer.write(b"z" * 1_000_000)
                await writer.drain()
            await asyncio.wait_for(reader.read(100), 2)
        finally:
            writer.close()

    async def idle() -> None:
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        await asyncio.sleep(1)
        for _, writer in pairs:
            writer.close()

    works = (head_without_end, body_without_key, idle) * 2
    await all_until(until, [repeat(until, work) for work in works])


ATTACKS: dict[str, Attack] = {
    "queues": flood_queues,
    "foreign": swell_foreign_bodies,
    "forgery": forge_digests,
    "archives": slow_archives,
    "sparse": swell_sparse_inputs,
    "losses": work_in_losses,
    "disk": fill_the_disk,
    "connections": hold_connections,
    "pages": ask_for_all_points,
    "strangers": knock_without_a_key,
}


async def in_turns(target: Target, until: float, each_s: float) -> None:
    """One attack after the other, each for a while, over and over."""
    while time.monotonic() < until:
        for attack in ATTACKS.values():
            ends = min(time.monotonic() + each_s, until)
            with contextlib.suppress(Exception):  # the server may be down: it is killed, too
                await attack(target, ends)
            await asyncio.sleep(max(0.0, min(ends - time.monotonic(), 1.0)))

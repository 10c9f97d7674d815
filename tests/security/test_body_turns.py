"""Bodies at `/v1` wait for their turn and for room; a crowd of small ones fills no memory."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import httpx
import orjson
import pytest
import zstandard
from app_world import AppWorld
from foreign_bodies import (
    BELOW,
    CHAT,
    HOSTILE,
    NOBODY,
    USER,
    chat,
    post,
)
from server_process import ServerProcess

from tinkex.server.compat import fields
from tinkex.server.compat.openai_chat import ChatRequest
from tinkex.server.guard.limits import BodyBudget
from tinkex.server.http.dependencies import READING_AT_ONCE
from tinkex.wire import json_codec
from tinkex.wire.budget import CHECKED, json_cost, parsed_json_bytes

GIB = 1024**3


def _most_parsed_at_once(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[], None]
) -> Callable[[], int]:
    """Call `note` whenever JSON is parsed; returns what tells how many were at most at a time."""
    lock, counts, now = threading.Lock(), [0], [0]
    parse = json_codec.loads_object

    def noted(content: bytes, **given: bool) -> dict[str, Any]:
        with lock:
            now[0] += 1
            counts.append(now[0])
        note()
        time.sleep(0.02)  # so that those who are not kept apart meet
        try:
            return parse(content, **given)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(json_codec, "loads_object", noted)
    return lambda: max(counts)


async def test_bodies_of_many_parts_are_read_few_at_a_time_and_off_the_event_loop(
    world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()
    most = _most_parsed_at_once(monkeypatch, lambda: threads.add(threading.current_thread()))
    answers = await asyncio.gather(*(post(world, CHAT, NOBODY) for _ in range(12)))
    assert {answer.status_code for answer in answers} == {400}
    assert "role 'nobody' is unknown" in answers[0].text
    assert most() <= READING_AT_ONCE
    assert threading.current_thread() not in threads


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "telemetry": ("telemetry", {"session_id": "x", "events": [{}] * 30_000}),
    "a sample": ("asample", {"prompt": {"chunks": [{"type": "x", "tokens": []}] * 30_000}}),
    "a pass": ("forward_backward", {"forward_backward_input": {"data": [{}] * 30_000}}),
    "tags": ("create_session", {"tags": [1] * 100_000}),
}


@pytest.mark.parametrize("name", OWN)
async def test_large_json_of_our_own_api_waits_for_room_and_its_turn_too(
    world: AppWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    budget: BodyBudget = world.parts.parsed_bodies
    most = _most_parsed_at_once(monkeypatch, lambda: held.append(budget.held_bytes))
    path, body = OWN[name]
    content, key = orjson.dumps(body), {"x-api-key": "tml-ann"}
    posts = [world.http.post(f"/api/v1/{path}", content=content, headers=key) for _ in range(8)]
    answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {400}
    assert most() <= READING_AT_ONCE
    assert min(held) > len(content)
    assert world.parts.parsed_bodies.held_bytes == 0


async def test_a_body_waits_for_room_for_what_it_becomes(world: AppWorld) -> None:
    budget: BodyBudget = world.parts.parsed_bodies
    raw = orjson.dumps(NOBODY)
    await budget.reserve("ann", budget.per_user_bytes)  # she has her share
    waiting = asyncio.create_task(post(world, CHAT, NOBODY))
    other = await world.http.post(
        CHAT, content=raw, headers={"authorization": "Bearer tml-bob"}
    )  # nobody waits for her
    assert other.status_code == 400
    assert not waiting.done()
    budget.release("ann", budget.per_user_bytes)
    assert (await waiting).status_code == 400
    assert budget.held_bytes == 0


def test_what_a_body_becomes_is_counted_generously() -> None:
    for body in (BELOW, chat(*[USER] * 9000), chat(USER, metadata={"a": [{}] * 40_000})):
        raw = orjson.dumps({"model": "toy"} | body)
        tracemalloc.start()
        made = fields._judged(raw, ChatRequest, lambda body: (body, body.asked()))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert made
        assert held < parsed_json_bytes(raw, json_cost(raw), CHECKED) < 20 * held


# ------------------------------------------------------------------------------------ a crowd


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = fuzz.talking_toy(tmp_path / "model")
    flags = ["--engine", settings["engine"], "--model", settings["models"][0]]
    flags += ["--alias", f"toy={settings['models'][0]}"]
    flags += ["--api-key", "tml-ann=ann", "--api-key", "tml-bob=bob"]
    with ServerProcess(tmp_path / "server", *flags) as server:
        yield server


def _memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.parametrize("body", [HOSTILE, BELOW], ids=["beyond the bounds", "below them"])
async def test_many_small_bodies_that_become_large_do_not_fill_the_memory(
    server: ServerProcess, body: dict[str, Any]
) -> None:
    """150 connections of one key, 400 bytes each; another key is served meanwhile."""
    content = zstandard.compress(orjson.dumps(body))
    assert len(content) < 1000
    headers = {"authorization": "Bearer tml-ann", "content-encoding": "zstd"}
    limits = httpx.Limits(max_connections=150)
    async with (
        httpx.AsyncClient(base_url=server.base_url, timeout=600, limits=limits) as crowd,
        httpx.AsyncClient(base_url=server.base_url, timeout=600) as other,
    ):
        posts = [
            asyncio.create_task(crowd.post(CHAT, content=content, headers=headers))
            for _ in range(150)
        ]
        polite = asyncio.create_task(_polite(other, posts))
        try:
            while not polite.done():
                held = _memory_bytes(server.pid)
                num_answered = sum(post.done() for post in posts)
                assert held < GIB, f"{held} bytes, {num_answered} of 150 answered"
                await asyncio.sleep(0.02)
            assert await polite > 0
            assert {post.result().status_code for post in posts} <= {200, 400, 429}
        finally:
            for task in (polite, *posts):
                task.cancel()
            await asyncio.gather(polite, *posts, return_exceptions=True)


async def _polite(other: httpx.AsyncClient, posts: list[asyncio.Task[httpx.Response]]) -> int:
    """Ask a small thing again and again while the crowd waits; gives how often."""
    small = {"model": "toy", "messages": [USER], "max_tokens": 2}
    num_served = 0
    while not all(post.done() for post in posts):
        key = {"authorization": "Bearer tml-bob"}
        answer = await other.post(CHAT, json=small, headers=key)
        assert answer.status_code == 200, answer.text
        num_served += 1
    return num_served

"""A body at `/v1` is counted before it is parsed, at what it becomes, and waits its turn."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import re
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import fuzz
import httpx
import orjson
import pytest
import zstandard
from app_world import AppWorld, open_app
from foreign_bodies import (
    CHAT,
    COMPLETIONS,
    COUNT,
    HEADERS,
    HOSTILE,
    MESSAGES,
    RESPONSES,
    USER,
    chat,
    post,
)
from pydantic import ValidationError

from tinkex.chat.tokenizer import FastTokenizer
from tinkex.errors import InvalidInputError
from tinkex.server.compat import fields, openai_completions
from tinkex.server.compat.chat_formats import ChatFormat
from tinkex.server.compat.openai_chat import ChatRequest
from tinkex.server.compat.openai_completions import CompletionRequest
from tinkex.server.fairness.gate import FairGate
from tinkex.server.guard.limits import BodyBudget
from tinkex.server.http import bodies
from tinkex.wire import json_codec

CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
LONG_NAMES = {"k" * 101 + str(n): 0 for n in range(1000)}


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


# ------------------------------------------------------------------------------------ counted

UNPARSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "calls": (CHAT, HOSTILE, "240242 lists and objects, the limit is 50000"),
    "calls of Anthropic's": (
        MESSAGES,
        chat({"role": "assistant", "content": [{"type": "tool_use"}] * 4000})
        | {"tools": [{}] * 50_000},
        "54005 lists and objects, the limit is 50000",
    ),
    "calls to count": (
        COUNT,
        chat({"role": "assistant", "content": [{"type": "tool_use"}] * 60_000}),
        "60004 lists and objects, the limit is 50000",
    ),
    "items": (RESPONSES, {"input": [{}] * 60_000}, "60002 lists and objects, the limit is 50000"),
    "unknown fields": (
        CHAT,
        chat(USER) | {str(n): 0 for n in range(490_000)},
        "490005 keys, the limit is 150000",
    ),
    "unknown fields of completions": (
        COMPLETIONS,
        {"prompt": "a"} | {str(n): 0 for n in range(5000)},
        "5002 keys, the limit is 4096",
    ),
    "an option": (
        CHAT,
        chat(USER, chat_template_kwargs={"reasoning_effort": [0] * 1_000_000}),
        "1000008 values, the limit is 250000",
    ),
    "lists of prompts": (
        COMPLETIONS,
        {"prompt": [[]] * 5000},
        "5002 lists and objects, the limit is 4096",
    ),
    "depth": (CHAT, chat(USER, metadata=deep(70)), "levels of lists and objects"),
}


@pytest.mark.parametrize("name", UNPARSED)
async def test_what_would_become_too_many_objects_is_refused_before_one_is_built(
    world: AppWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    parse = json_codec.loads_object

    def noted(content: bytes, **given: bool) -> dict[str, Any]:
        parsed.append(len(content))
        return parse(content, **given)

    monkeypatch.setattr(json_codec, "loads_object", noted)
    path, body, said = UNPARSED[name]
    answer = await post(world, path, body)
    assert (answer.status_code, parsed) == (400, []), answer.text
    assert said in answer.json()["error"]["message"]
    assert world.parts.bodies.held_bytes == world.parts.parsed_bodies.held_bytes == 0


UNCHECKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 480_000}, "480000 prompts, the limit is 1024"),
    "calls in a message": (
        CHAT,
        chat(USER | {"tool_calls": [CALL] * 1025}),
        "1025 calls of tools, the limit is 1024",
    ),
    "calls in all": (
        CHAT,
        chat(*[USER | {"tool_calls": [CALL] * 1000}] * 11),
        "11000 calls of tools in all, the limit is 10000",
    ),
    "parts of a message": (
        CHAT,
        chat({"role": "user", "content": [{"type": "text", "text": ""}] * 4097}),
        "4097 parts of content, the limit is 4096",
    ),
    "parts in all": (
        MESSAGES,
        chat(*[{"role": "user", "content": [{"type": "text", "text": ""}] * 4001}] * 5),
        "20005 parts of content in all, the limit is 20000",
    ),
    "parts of a result": (
        RESPONSES,
        {"input": [{"type": "function_call_output", "output": [{}] * 4097}]},
        "4097 parts of content, the limit is 4096",
    ),
    "messages": (CHAT, chat(*[USER] * 10_001), "10001 messages, the limit is 10000"),
    "items": (RESPONSES, {"input": [USER] * 10_001}, "10001 messages, the limit is 10000"),
    "tools": (CHAT, chat(USER, tools=[_tool()] * 1025), "1025 tools, the limit is 1024"),
    "a field nobody knows": (
        CHAT,
        chat(USER) | {f"n{n}": 0 for n in range(100_000)},
        "the field 'n0' is not known here",
    ),
}


@pytest.mark.parametrize("name", UNCHECKED)
async def test_too_many_of_a_kind_are_refused_before_one_is_looked_at(
    world: AppWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []

    def noted(cls: type, value: Any) -> Any:
        looked_at.append(cls.__name__)
        raise AssertionError("validation was reached")

    for kind in (ChatRequest, CompletionRequest):
        monkeypatch.setattr(kind, "model_validate", classmethod(noted))
    path, body, said = UNCHECKED[name]
    answer = await post(world, path, body)
    assert (answer.status_code, looked_at) == (400, []), answer.text
    assert said in answer.json()["error"]["message"]


def _calling(arguments: str, times: int = 1) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return chat(*[USER | {"tool_calls": [call]}] * times)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a list as an option": (
        CHAT,
        chat(USER, chat_template_kwargs={"reasoning_effort": ["x"] * 1000}),
        "'reasoning_effort' must be a text, a number, true, false or null, got a list",
    ),
    "a long option": (
        CHAT,
        chat(USER, chat_template_kwargs={"reasoning_effort": "x" * 300_000}),
        "at most 256 characters",
    ),
    "calls in one turn": (
        RESPONSES,
        {"input": [{"type": "function_call", "name": "f"}] * 1025},
        "1025 calls in one turn, the limit is 1024",
    ),
    "calls of one turn": (
        MESSAGES,
        chat({"role": "assistant", "content": [{"type": "tool_use", "name": "f"}] * 1025}),
        "1025 calls in a message, the limit is 1024",
    ),
    "lists in arguments": (
        CHAT,
        _calling('{"a":[' + "[]," * 60_000 + "[]]}"),
        "the arguments of the calls have 60003 lists and objects, the limit is 50000",
    ),
    "lists in the arguments of many": (
        CHAT,
        _calling('{"a":[' + "[]," * 60 + "[]]}", 1000),
        "the arguments of the calls have 63000 lists and objects, the limit is 50000",
    ),
    "depth of arguments": (
        CHAT,
        _calling('{"a":' + "[" * 100_000),
        "100001 lists and objects",
    ),
    "some depth of arguments": (
        CHAT,
        _calling('{"a":' + "[" * 2000),
        "2001 levels of lists and objects",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_hides_in_texts_and_options_is_refused_in_its_own_terms(
    world: AppWorld, name: str
) -> None:
    path, body, said = REFUSED[name]
    answer = await post(world, path, body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1] + ["a"] * 1000}),
        (CompletionRequest, {"prompt": ["a"] + [1] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 64}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": [USER | {"content": [{}] * 1000}]}),
        (ChatRequest, {"messages": [USER | {"tool_calls": [{}] * 1000}]}),
        (ChatRequest, {"messages": [USER], "tools": [{}] * 1000}),
        (ChatRequest, {"messages": [USER], "chat_template_kwargs": LONG_NAMES}),
        (ChatRequest, {"messages": [USER], "stream_options": LONG_NAMES}),
        (CompletionRequest, {"prompt": "a", "stream_options": {"k" * 101: 0, "l" * 101: 0}}),
    ],
)
def test_the_first_wrong_entry_of_a_list_or_of_options_ends_the_check(
    kind: type[fields.ForeignBody], body: dict[str, Any]
) -> None:
    """An error is larger than what it is about: a million of them is what an attacker asks for."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"model": "toy"} | body)
    assert refused.value.error_count() < 12


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {f"k{n}": "x" for n in range(100_000)}},
        {"chat_template_kwargs": {f"k{n}": "x" for n in range(100_000)}},
        {"stop": "x" * 1_500_000},
        {"messages": [{"role": "user", "content": 1, "name": "x" * 1_500_000}]},
    ],
)
def test_a_refused_body_is_gone_with_its_refusal(more: dict[str, Any]) -> None:
    """Without the garbage collector, which rarely looks: texts are nothing that it counts."""
    raw = orjson.dumps({"model": "toy"} | chat(USER) | more)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError):
            fields._judged(raw, ChatRequest, lambda body: body)
        held, _ = tracemalloc.get_traced_memory()
        assert held < 1_000_000
    finally:
        tracemalloc.stop()
        gc.enable()


# ------------------------------------------------------------------------------------ unpacked


@pytest.mark.parametrize("path", [CHAT, "/api/v1/asample"])
async def test_a_body_of_several_zstd_frames_is_unpacked_in_its_room_and_off_the_event_loop(
    world: AppWorld, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first frame says how large it is, and nothing of those that follow."""
    seen: list[tuple[int, bool]] = []
    unpack = bodies.unpack

    def noted(*given: Any, **more: Any) -> bytes:
        found = unpack(*given, **more)
        on_loop = threading.current_thread() is threading.main_thread()
        seen.append((world.parts.bodies.held_bytes, on_loop))
        return found

    monkeypatch.setattr(bodies, "unpack", noted)
    rest = b'"messages": [{"role": "nobody", "content": "' + b"x" * 9_000_000 + b'"}]}'
    content = zstandard.compress(b'{"model": "toy", ') + zstandard.compress(rest)
    headers = HEADERS | {"content-encoding": "zstd", "x-api-key": "tml-ann"}
    answer = await world.http.post(path, content=content, headers=headers)
    assert answer.status_code == 400
    assert "role 'nobody'" in answer.text or "prompt: is needed" in answer.text
    assert [held > 9_000_000 and not on_loop for held, on_loop in seen] == [True]
    assert world.parts.bodies.held_bytes == 0


async def test_a_frame_that_does_not_say_its_size_waits_for_no_more_room_than_it_takes(
    world: AppWorld,
) -> None:
    """As compressors of streams write it. The route's limit, 256 MB, is more than one user's share:
    whoever reserved that beside the packed body waited for room until it was refused."""
    budget = world.parts.bodies
    text = random.Random(0).randbytes(30_000).hex()
    packer = zstandard.ZstdCompressor().compressobj()
    content = packer.compress(text.encode()) + packer.flush()
    assert zstandard.frame_content_size(content) == -1
    assert len(content) > bodies.SMALL_BODY_BYTES
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    request = world.http.post(
        "/api/v1/forward_backward", content=content, headers=headers | {"x-api-key": "tml-ann"}
    )
    answer = await asyncio.wait_for(request, 20)
    assert answer.status_code in (400, 422), answer.text  # it was read, and is no request
    assert budget.held_bytes == 0


async def test_a_packed_body_beyond_a_users_share_fits_alone(world: AppWorld) -> None:
    budget = BodyBudget(1000)
    await budget.reserve("ann", 100)
    await asyncio.wait_for(budget.reserve("ann", 900, own_bytes=100), 5)
    assert budget.held_bytes == 1000


async def test_frames_that_unpack_to_more_than_the_route_takes_are_refused(world: AppWorld) -> None:
    content = zstandard.compress(b"{") + zstandard.compress(b" " * 17_000_000) * 100
    headers = HEADERS | {"content-encoding": "zstd"}
    answer = await world.http.post(CHAT, content=content, headers=headers)
    assert answer.status_code == 413
    small = zstandard.compress(b'{"model": "toy", "prompt": ') + zstandard.compress(b'"hi"}')
    answer = await world.http.post(COMPLETIONS, content=small, headers=headers)
    assert answer.status_code == 200, answer.text


# ------------------------------------------------------------------------------------ tokens


def _notes_texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each text that is tokenized: how long it is, and whether on the event loop."""
    seen: list[tuple[int, bool]] = []
    encode = FastTokenizer.encode

    def noted(self: FastTokenizer, text: str, *given: Any, **more: Any) -> list[int]:
        seen.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(self, text, *given, **more)

    monkeypatch.setattr(FastTokenizer, "encode", noted)
    return seen


LONG = "x y " * 3_000_000
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": (CHAT, chat({"role": "user", "content": LONG})),
    "a text of a trajectory": (CHAT, chat({"role": "user", "content": LONG}, trajectory="t")),
    "a schema": (CHAT, chat(USER, tools=[_tool(description=LONG)])),
    "a prompt": (COMPLETIONS, {"prompt": LONG}),
    "a text of Anthropic's": (MESSAGES, chat({"role": "user", "content": LONG})),
    "a text to count": (COUNT, chat({"role": "user", "content": LONG})),
    "an input": (RESPONSES, {"input": LONG}),
}


@pytest.mark.parametrize("name", TOO_LONG)
async def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(
    world: AppWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenized whole it takes 2 GB."""
    seen = _notes_texts(monkeypatch)
    path, body = TOO_LONG[name]
    answer = await post(world, path, body)
    assert answer.status_code == 400, answer.text
    assert "exceed the context of 32768" in answer.json()["error"]["message"]
    assert sum(length for length, _ in seen) < 300_000
    assert not any(on_loop for _, on_loop in seen)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat({"role": "user", "content": "x" * 20_000})),
        (COMPLETIONS, {"prompt": "x" * 20_000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": ["x" * 40] * 500, "max_tokens": 1}),
    ],
)
async def test_texts_of_many_characters_are_tokenized_off_the_event_loop(
    world: AppWorld, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _notes_texts(monkeypatch)
    answer = await post(world, path, body)
    assert answer.status_code == 200, answer.text
    assert seen
    assert not any(on_loop for _, on_loop in seen)


async def test_a_long_text_that_fits_has_the_tokens_of_the_whole(world: AppWorld) -> None:
    here = await world.app.state.compat.chat_formats.of(world.parts.service.catalog.names[0])
    text = "some words, " * 180_000
    info = dataclasses.replace(here.info, max_context_length=len(text))
    roomy = ChatFormat(info, here.chat)
    assert [*roomy.tokens(text)] == here.tokenizer.encode(text)
    assert [*roomy.rendered(text)] == here.chat.encode(text)
    with pytest.raises(InvalidInputError, match="exceed the context of 32768"):
        here.tokens(text)


async def test_the_console_counts_tokens_off_the_event_loop_in_its_turn(
    world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.http.post("/console/login", data={"key": "tml-ann"})
    page = await world.http.get("/console/playground")
    token = re.findall(r'name="form-token" content="(\w+)"', page.text)[0]
    seen = _notes_texts(monkeypatch)
    texts = {"model": "toy", "prompt": ["some words", "x" * 20_000]}
    turns: FairGate = world.app.state.compat.chat_formats._turns
    others = [f"user {n}" for n in range(turns.num_slots)]
    for other in others:
        await turns.acquire(other)
    posted = asyncio.create_task(
        world.http.post(
            "/console/api/count/completion", json=texts, headers={"x-form-token": token}
        )
    )
    while not turns.num_waiting:
        assert not posted.done()
        await asyncio.sleep(0.01)
    assert not seen
    for other in others:
        turns.release(other)
    assert (await posted).json() == {"num_tokens": 20_010}
    assert seen == [(10, False), (20_000, False)]


async def test_samples_of_many_prompts_begin_a_few_at_a_time() -> None:
    turns, begun = [0], Counter[int]()

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def sample() -> Any:
        begun[turns[0]] += 1
        await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    made = await openai_completions._together(sample() for _ in range(1024))
    ticking.cancel()
    assert (len(made), begun.total()) == (1024, 1024)
    assert max(begun.values()) <= 2 * openai_completions.BEGUN_AT_ONCE


# ------------------------------------------------------------------------------------ taken


async def test_a_long_conversation_of_an_agent_is_served(tmp_path: Path) -> None:
    """4,000 messages in parts, 2,000 calls with code in their arguments, 128 tools."""
    settings = fuzz.talking_toy(tmp_path / "model")
    code = orjson.dumps({"code": "if (a[0]) { b[1] = {}; }"}).decode()
    call = {"function": {"name": "f", "arguments": code}}
    turn = [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "y"}], "tool_calls": [call]},
    ]
    schema = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(40)}}
    tools = [_tool(parameters=schema)] * 128
    body = chat(*turn * 2000, tools=tools)
    async with open_app(tmp_path / "data", api_keys=("tml-ann=ann",), **settings) as world:
        await world.facts()
        answer = await post(world, CHAT, body)
        # It is read and rendered whole; only the toy's context is too short for it.
        assert "exceed the context of 32768" in answer.json()["error"]["message"]
        answer = await post(world, CHAT, chat(*turn * 200))
        assert answer.status_code == 200, answer.text
        assert world.parts.parsed_bodies.held_bytes == 0


async def test_brackets_in_a_text_are_text(world: AppWorld) -> None:
    body = chat({"role": "user", "content": "[]{},:" * 200_000})
    answer = await post(world, CHAT, body)
    assert "exceed the context of 32768" in answer.json()["error"]["message"]


async def test_a_prompt_of_many_token_ids_and_many_prompts_are_taken(world: AppWorld) -> None:
    ids = await post(world, COMPLETIONS, {"prompt": [5] * 100_000, "max_tokens": 1})
    assert "exceed the context of 32768" in ids.json()["error"]["message"]
    ids = await post(world, COMPLETIONS, {"prompt": [5] * 30_000, "max_tokens": 1})
    assert ids.status_code == 200, ids.text
    assert ids.json()["usage"]["prompt_tokens"] == 30_000
    texts = await post(world, COMPLETIONS, {"prompt": ["hi"] * 1024, "max_tokens": 1})
    assert len(texts.json()["choices"]) == 1024


ANSWERED: dict[str, dict[str, Any]] = {
    CHAT: chat(USER, tools=[_tool()], logprobs=True, return_token_ids=True, n=2),
    MESSAGES: chat(USER, tools=[{"name": "f", "input_schema": {}}]),
    RESPONSES: {
        "input": "hi",
        "instructions": "be",
        "tools": [{"type": "function", "name": "f"}],
        "max_output_tokens": 4,
    },
}


@pytest.mark.parametrize("path", ANSWERED)
async def test_an_answer_to_a_large_body_is_that_to_a_small_one(world: AppWorld, path: str) -> None:
    """Once the prompt is made, most of a large body is let go; the answer has all it needs."""
    filling = {"metadata": {f"k{n}": [] for n in range(3000)}}
    body = ANSWERED[path] | {"temperature": 0.0, "seed": 1}
    small, large = [await post(world, path, body | more) for more in ({}, filling)]
    assert (small.status_code, large.status_code) == (200, 200), large.text
    assert _told(small) == _told(large)
    streams = [await post(world, path, body | more | {"stream": True}) for more in ({}, filling)]
    ends = [stream.text.strip().rpartition("data: ")[2][:40] for stream in streams]
    assert [stream.status_code for stream in streams] == [200, 200]
    assert ends[0] == ends[1]
    assert "error" not in streams[1].text.replace('"error":null', "")


def _told(answer: httpx.Response) -> Any:
    """All of an answer but ids and times, and what a cache was good for."""
    varying = ("id", "created", "created_at", "usage")
    told = {name: value for name, value in answer.json().items() if name not in varying}
    for item in told.get("output", ()):
        item.pop("id")
    return told

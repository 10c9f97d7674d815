"""Anthropic's endpoint: the same answers, in its shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

VERSION = {"anthropic-version": "2023-06-01"}


def ask(api, model: str, **fields: Any):
    body = {"model": model, "max_tokens": 8, "temperature": 0, **fields}
    body.setdefault("messages", [{"role": "user", "content": "abc"}])
    return api.post("/v1/messages", json=body, headers=VERSION)


def test_it_says_what_openais_endpoint_says(world, api):
    said = ask(api, world.path).json()
    assert "content" in said, said
    body = {"model": world.path, "max_tokens": 8, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "abc"}]
    same = api.post("/v1/chat/completions", json=body).json()
    assert said["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert said["usage"]["output_tokens"] == same["usage"]["completion_tokens"]


def test_a_stream_says_what_the_whole_says(world, api):
    whole = ask(api, world.path).json()
    lines = ask(api, world.path, stream=True).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def test_a_conversation_with_tools_is_taken(world, api):
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    messages = [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
    ]
    answer = ask(api, world.model, system="Be brief.", tools=tools, messages=messages)
    assert answer.status_code == 200, answer.text


def test_what_does_nothing_is_named_in_a_header(world, api):
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "abc", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2", "is_error": True}
            ],
        },
    ]
    answer = ask(
        api,
        world.model,
        messages=messages,
        metadata={"user_id": "x"},
        system=[{"type": "text", "text": "Be brief.", **cached}],
        tools=[{"name": "add", "input_schema": {"type": "object"}, "type": "custom", **cached}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tinkex-ignored"].split(", ") == [
        "messages.content.cache_control",
        "messages.content.is_error",
        "messages.content.redacted_thinking",
        "metadata",
        "output_config.effort",
        "system.cache_control",
        "thinking",
        "thinking.budget_tokens",
        "tools.cache_control",
    ]


def test_tokens_are_counted_without_sampling(world, api):
    body = {"model": world.model, "messages": [{"role": "user", "content": "abc"}]}
    counted = api.post("/v1/messages/count_tokens", json=body, headers=VERSION).json()
    used = ask(api, world.model).json()["usage"]  # in which tokens of the cache stand apart
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 99_999}, 400, "max_tokens"),
        ({"wings": 1}, 400, "wings"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "image"),
    ],
)
def test_refusals_have_anthropics_shape(world, api, fields, status: int, word: str):
    answer = ask(api, **{"model": world.model, **fields})
    told = answer.json()
    assert answer.status_code == status
    assert told["type"] == "error"
    assert word in told["error"]["message"]


def test_the_version_header_is_needed(world, api):
    answer = api.post("/v1/messages", json={"model": world.model})
    assert answer.status_code == 400
    assert "anthropic-version" in answer.json()["error"]["message"]

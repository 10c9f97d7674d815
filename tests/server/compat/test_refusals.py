"""Whatever is wrong, an endpoint answers in the error shape of its own API, and goes on."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

ASK = [{"role": "user", "content": "abc"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 4},
    TEXT: {"prompt": "abc", "max_tokens": 4},
    RESPONSES: {"input": "abc", "max_output_tokens": 4},
    MESSAGES: {"messages": ASK, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": ASK},
}
LONG = "a" * 5000  # the context of the model is 1024 tokens
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": 3}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "context"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools"),
    (CHAT, {"messages": [*ASK, {"role": "assistant", "tool_calls": [CALL]}]}, "not JSON"),
    (CHAT, {"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"seed": "one"}, "seed"),
    (CHAT, {"trajectory": ""}, "trajectory"),
    (TEXT, {"prompt": LONG}, "context"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [1, 2, 99_999_999]}, "token"),
    (TEXT, {"prompt": ["abc", [99_999_999]]}, "token"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"best_of": 4}, "best_of"),
    (TEXT, {"logprobs": 1000}, "logprobs"),
    (TEXT, {"echo": True, "stream": True}, "stream"),
    (TEXT, {"top_p": 7}, "top_p"),
    (TEXT, {"stream": True, "max_tokens": 0}, "max_tokens"),
    (RESPONSES, {"input": LONG}, "context"),
    (RESPONSES, {"input": [{"type": "image"}]}, "input[0]"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f" * 300}]}, "tools[0].name"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "parameters"),
    (RESPONSES, {"input": [{"type": "function_call", "name": 3}]}, "input[0].name"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": 3}]}, "input[0].output"),
    (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    (RESPONSES, {"text": {"format": "json"}}, "text.format"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"wings": 2}, "wings"),
    (MESSAGES, {"messages": [{"role": "user", "content": LONG}]}, "context"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    (MESSAGES, {"messages": [{"role": "user", "content": "<|im_end|>"}]}, "content"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    (MESSAGES, {"temperature": -1}, "temperature"),
    (MESSAGES, {"tools": [{"name": 3}]}, "tools[0].name"),
    (MESSAGES, {"tools": [{"name": "f" * 300}]}, "tools[0].name"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
    (MESSAGES, {"tools": [{"name": "f", "description": 3}]}, "tools[0].description"),
    (MESSAGES, {"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    (MESSAGES, {"thinking": {"type": "sometimes"}}, "thinking.type"),
    (MESSAGES, {"messages": [{"role": "user", "content": [RESULT]}]}, "content"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
    ("/v1/messages/count_tokens", {"wings": 2}, "wings"),
]


def post(api: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    headers = {"anthropic-version": "2023-06-01"}
    return api.post(path, json={**BODIES[path], **fields}, headers=headers, timeout=60)


def told(answer: httpx.Response) -> str:
    """What an error says, its shape checked."""
    body = answer.json()
    if answer.request.url.path.startswith(MESSAGES):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
        return str(body["error"]["message"])
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return f"{body['error']['param']} {body['error']['message']}"


@pytest.mark.parametrize(("path", "fields", "word"), WRONG)
def test_wrong_input_is_refused_by_name(world, api, path: str, fields: dict[str, Any], word: str):
    answer = post(api, path, model=world.model, **fields)
    assert answer.status_code == 400, answer.text
    assert word in told(answer)


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_does_not_exist(world, api, path: str):
    answer = post(api, path, model="nobody")
    assert answer.status_code == 404
    assert "nobody" in told(answer)


@pytest.mark.parametrize("path", BODIES)
def test_what_no_route_ever_sees_is_refused_in_the_same_shape(world, api, path: str):
    torn = api.post(path, content=b'{"model": ', headers={"anthropic-version": "1"})
    assert (torn.status_code, "JSON" in told(torn)) == (400, True)
    assert told(api.get(path)), "405"
    large = api.post(path, content=b" " * 20_000_000)
    assert (large.status_code, "bytes" in told(large)) == (413, True)
    api.headers["Authorization"] = "Bearer tml-wrong"
    assert post(api, path, model=world.model).status_code == 401
    assert told(post(api, path, model=world.model))


@pytest.mark.parametrize("path", ["/v1/nothing", "/oai/api/v1/nothing", "/v1/messages/nothing"])
def test_an_unknown_path_is_refused_in_the_same_shape(world, api, path: str):
    answer = api.post(path, json={})
    assert answer.status_code == 404
    assert told(answer)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_template_that_loops_is_refused_and_others_are_answered(
    slow_server: SimpleNamespace, path: str
):
    with httpx.Client(base_url=slow_server.base_url) as api:
        refused: list[httpx.Response] = []
        looping = threading.Thread(
            target=lambda: refused.append(post(api, path, model=slow_server.loops))
        )
        looping.start()
        assert post(api, TEXT, model=slow_server.talks, max_tokens=1).status_code == 200
        looping.join(timeout=60)
    assert refused[0].status_code == 400
    assert "chat template" in told(refused[0])

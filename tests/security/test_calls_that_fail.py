"""A conversation is answered or refused, whatever the arguments of its calls are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fuzz
import pytest
from app_world import AppWorld, open_app

from tinkex.chat.messages import Message, ToolCall
from tinkex.server.compat import trajectories
from tinkex.server.compat.dialogue import Asked

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEADERS = {"authorization": "Bearer tml-ann", "anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "hi"}
LARGE = 2**64


def _deep(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


ARGUMENTS = {
    "a large number": (f'{{"a": {LARGE}}}', 200),
    "a larger number": ('{"a": ' + "9" * 4000 + "}", 200),
    "a number of 5000 digits": ('{"a": ' + "9" * 5000 + "}", 400),
    "half a character": ('{"a": "\\ud800"}', 400),
    "half a character as a key": ('{"\\udfff": 1}', 400),
    "a character in two parts": ('{"a": "\\ud83d\\ude00"}', 200),
    "64 levels": (_deep(64), 200),
    "500 levels": (_deep(500), 400),
    "100,000 levels": (_deep(100_000), 400),
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    settings = fuzz.talking_toy(tmp_path / "model")
    async with open_app(tmp_path / "data", api_keys=("tml-ann=ann",), **settings) as world:
        await world.facts()
        yield world


def _chat(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}


def _responses(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return RESPONSES, {"input": [USER, call, USER], "max_output_tokens": 2}


@pytest.mark.parametrize("body", [_chat, _responses], ids=["chat", "responses"])
@pytest.mark.parametrize("trajectory", [None, "one"], ids=["", "recorded"])
@pytest.mark.parametrize("name", ARGUMENTS)
async def test_odd_arguments_are_answered_or_refused(
    world: AppWorld, name: str, trajectory: str | None, body: Any
) -> None:
    arguments, status = ARGUMENTS[name]
    path, fields = body(arguments)
    limit = {} if path == RESPONSES else {"max_tokens": 2}
    asked = {"model": "toy", **limit, **fields}
    headers = HEADERS if trajectory is None else HEADERS | {"x-tinkex-trajectory": trajectory}
    answer = await world.http.post(path, json=asked, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "argument" in answer.json()["error"]["message"]


@pytest.mark.parametrize("trajectory", [None, "one"], ids=["", "recorded"])
@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b'{"a": 18446744073709551616}', {200, 400}),
        (b'{"a": "\\ud800"}', {400}),
        (_deep(500).encode(), {400}),
        (_deep(100_000).encode(), {400}),
    ],
    ids=["a large number", "half a character", "500 levels", "100,000 levels"],
)
async def test_odd_inputs_of_anthropics_calls_are_answered_or_refused(
    world: AppWorld, given: bytes, status: set[int], trajectory: str | None
) -> None:
    body = (
        b'{"model": "toy", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}, '
        b'{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": '
        + given
        + b'}]}, {"role": "user", "content": "hi"}]}'
    )
    headers = HEADERS if trajectory is None else HEADERS | {"x-tinkex-trajectory": trajectory}
    headers = headers | {"content-type": "application/json"}
    answer = await world.http.post(MESSAGES, content=body, headers=headers)
    assert answer.status_code in status, answer.text


@pytest.mark.parametrize("arguments", [f'{{"a": {LARGE}}}', '{"a": "é"}'])
def test_an_answer_with_a_large_number_is_recorded_under_its_own_digest(arguments: str) -> None:
    """A model may write any number, and orjson none above 64 bits."""
    asked = Asked(model="toy", messages=[Message(role="user", content="hi")])

    def said(arguments: str) -> Message:
        call = ToolCall(name="f", arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))

    first, again, other = (
        trajectories._digests(asked, said(given))[-1]
        for given in (arguments, arguments.replace(" ", ""), '{"a": 1}')
    )
    assert first == again != other

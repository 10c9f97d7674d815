"""A client that hangs up cancels its sample: the server's one place is free again."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

LONG = 1000  # tokens; more than three minutes here
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


def body(path: str, model: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": model, **fields}
    asked["max_output_tokens" if path.endswith("responses") else "max_tokens"] = num_tokens
    if path.endswith("responses"):
        asked["input"] = "abc"
    elif path == "/v1/completions":
        asked |= {"prompt": "abc", "stop": []}
    else:
        asked["messages"] = [{"role": "user", "content": "abc"}]
    return asked


def send(server: SimpleNamespace, path: str, **fields: Any) -> socket.socket:
    """A request of which nothing is read yet."""
    # The toy's likeliest token is never the end; a drawn one is, once in thirty.
    content = json.dumps(body(path, server.talks, LONG, temperature=0, **fields)).encode()
    where = urlsplit(server.base_url)
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        f"anthropic-version: 2023-06-01\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def is_answered(server: SimpleNamespace) -> bool:
    """Whether a short request gets the one place, long before a long one would end."""
    asked = body("/v1/completions", server.talks, 1)
    answer = httpx.post(f"{server.base_url}/v1/completions", json=asked, timeout=100)
    return answer.status_code == 200


def wait_queued(server: SimpleNamespace, expected: int) -> None:
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at:
        text = httpx.get(f"{server.base_url}/metrics").text
        found = re.search(r"^tinkex_queued_samples (\S+)", text, re.MULTILINE)
        if found and float(found[1]) == expected:
            return
        time.sleep(0.05)
    raise AssertionError(f"{expected} samples were to wait:\n{text}")


@pytest.mark.parametrize("path", PATHS)
def test_hanging_up_on_a_stream_cancels_it(slow_server: SimpleNamespace, path: str):
    with closing(send(slow_server, path, stream=True)) as connection:
        begun = b""
        while b"data: " not in begun:
            begun += connection.recv(4096)
    assert b" 200 " in begun.partition(b"\r\n")[0]
    assert is_answered(slow_server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_hanging_up_before_the_answer_cancels_it(
    slow_server: SimpleNamespace, path: str, stream: bool
):
    """Of two requests one runs and the other waits for its place; neither is left behind."""
    with (
        closing(send(slow_server, path, stream=False)),
        closing(send(slow_server, path, stream=stream)),
    ):
        wait_queued(slow_server, 1)
    assert is_answered(slow_server)
    wait_queued(slow_server, 0)

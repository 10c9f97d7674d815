"""Bodies for `/v1` that another program might send: small on the way, large where they are read."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import zstandard
from app_world import AppWorld

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HEADERS = {"authorization": "Bearer tml-ann", "anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "hi"}
LEAN_CALL = {"function": {"name": "f"}}
HOSTILE = {"model": "toy", "messages": [USER | {"tool_calls": [LEAN_CALL] * 1000}] * 120}
"""3.4 MB of JSON, about 400 bytes under zstd."""
BELOW = {"model": "toy", "messages": [USER | {"tool_calls": [LEAN_CALL] * 990}] * 10}
"""The same, as large as may be."""
NOBODY = {"model": "toy", "messages": [{"role": "nobody", "content": ""}] * 9000}
"""Read whole, and refused by whoever would render it."""


async def post(world: AppWorld, path: str, body: dict[str, Any]) -> httpx.Response:
    content = zstandard.compress(orjson.dumps({"model": "toy"} | body))
    headers = HEADERS | {"content-encoding": "zstd"}
    return await world.http.post(path, content=content, headers=headers)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], "max_tokens": 2, **more}

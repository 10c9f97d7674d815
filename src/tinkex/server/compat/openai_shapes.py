"""OpenAI's way of saying things: errors, usage, logprobs, and lines of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute

from tinkex.server import problems
from tinkex.server.compat.voices import Voice
from tinkex.server.compat.wording import token_bytes, token_text
from tinkex.types import SampledSequence, SampleResponse

DONE = b"data: [DONE]\n\n"
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class OpenAIRoute(APIRoute):
    """A route that answers every failure in OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as exc:
                ours = problems.response_for(exc)
                return Response(
                    orjson.dumps(error_body(ours)),
                    status_code=ours.status_code,
                    media_type="application/json",
                    headers={k: v for k, v in ours.headers.items() if k == "retry-after"},
                )

        return answer


def error_body(ours: Response) -> dict[str, Any]:
    """OpenAI's words for an answer of ours."""
    told = orjson.loads(ours.body)
    kind = _TYPES.get(ours.status_code)
    if kind is None:
        kind = "server_error" if ours.status_code >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": told["detail"],
            "type": "rate_limit_error" if ours.status_code == 429 else kind,
            "param": told.get("path"),
            "code": told["code"],
        }
    }


def line(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def streamed(lines: AsyncIterator[bytes], headers: dict[str, str]) -> Response:
    """A stream whose first line is awaited here: what is refused is an answer of its own."""
    first = await anext(lines)

    async def all_lines() -> AsyncIterator[bytes]:
        yield first
        try:
            async for one in lines:
                yield one
        except Exception as exc:  # the status is long out: the stream itself says what happened
            yield line(error_body(problems.response_for(exc)))

    return StreamingResponse(
        all_lines(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers},
    )


def usage(num_prompt: int, response: SampleResponse) -> dict[str, Any]:
    num_new = sum(len(sequence.tokens) for sequence in response.sequences)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": response.prompt_cache_hit_tokens or 0},
    }


def chat_logprobs(voice: Voice, sequence: SampledSequence) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    tokens = [int(token) for token in sequence.tokens]
    return {
        "content": [
            {
                **_scored(voice, token, logprob),
                "top_logprobs": [_scored(voice, *pair) for pair in likeliest(sequence, at)],
            }
            for at, (token, logprob) in enumerate(zip(tokens, sequence.logprobs or [], strict=True))
        ],
        "refusal": None,
    }


def _scored(voice: Voice, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(voice.tokenizer, token),
        "logprob": float(logprob),
        "bytes": token_bytes(voice.tokenizer, token),
        "token_id": int(token),
    }


def likeliest(sequence: SampledSequence, at: int) -> Sequence[tuple[int, float]]:
    """The likeliest tokens at a position, when they were asked for."""
    topk = sequence.topk_logprobs
    return (topk[at] or []) if topk else []

"""OpenAI's way of saying how many tokens there were, and how likely each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tinkex.server.compat.chat_formats import ChatFormat
from tinkex.server.compat.wording import token_bytes, token_text
from tinkex.types import SampledSequence, SampleResponse


def usage(
    num_prompt: int, response: SampleResponse, num_thoughts: int | None = None
) -> dict[str, Any]:
    """Counts of tokens read and made, also of those cut off; thoughts only where they are read.

    Completions have no thoughts, chats have.
    """
    thoughts = {} if num_thoughts is None else {"reasoning_tokens": num_thoughts}
    num_new = sum(len(sequence.tokens) for sequence in response.sequences)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": response.prompt_cache_hit_tokens or 0},
        **({"completion_tokens_details": thoughts} if thoughts else {}),
    }


def chat_logprobs(chat_format: ChatFormat, sequence: SampledSequence) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    rows = enumerate(zip(sequence.tokens, sequence.logprobs or [], strict=True))
    entries = (  # encoded one by one: as objects they are many times as large
        orjson.dumps(
            {
                **_scored(chat_format, int(token), logprob),
                "top_logprobs": [_scored(chat_format, *pair) for pair in likeliest(sequence, at)],
            }
        )
        for at, (token, logprob) in rows
    )
    return {"content": orjson.Fragment(b"[" + b",".join(entries) + b"]"), "refusal": None}


def _scored(chat_format: ChatFormat, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(chat_format.tokenizer, token),
        "logprob": float(logprob),
        "bytes": token_bytes(chat_format.tokenizer, token),
        "token_id": int(token),
    }


def likeliest(sequence: SampledSequence, at: int) -> Sequence[tuple[int, float]]:
    """The likeliest tokens at a position, when they were asked for."""
    topk = sequence.topk_logprobs
    return (topk[at] or []) if topk else []

"""OpenAI's `/completions`: text in, text out, with the prompt's logprobs on request.

What evaluation harnesses use: `echo` with `logprobs` scores a given text, prompts may be token ids,
and many prompts may stand in one request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import orjson
from fastapi import APIRouter, Request, Response

from tinkex.contract import sampling
from tinkex.contract.bounds import Between
from tinkex.contract.cost import NOTHING, Cost
from tinkex.errors import InvalidInputError
from tinkex.server.compat import fields, replies
from tinkex.server.compat.chat_formats import LARGE_TEXT, ChatFormat
from tinkex.server.compat.dependencies import compat_of
from tinkex.server.compat.dialogue import find_model
from tinkex.server.compat.fields import SamplingFields, Stops
from tinkex.server.compat.model_names import SampleTarget
from tinkex.server.compat.openai_shapes import likeliest, usage
from tinkex.server.compat.replies import event
from tinkex.server.compat.running_sample import RunningSample, SampleSpec, check_told, prompt_scores
from tinkex.server.compat.trajectories import trajectory_of
from tinkex.server.compat.wording import AnswerText, token_text
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.bodies import let_go_parsed
from tinkex.server.http.dependencies import service_of
from tinkex.server.jobs.validation import check_length
from tinkex.store import User
from tinkex.types import SampledSequence, SampleResponse
from tinkex.types.fields.bounds import listing

router = APIRouter(tags=["openai"])
MAX_PROMPTS = 1024
BEGUN_AT_ONCE = 4
"""Samples of one request that begin before others have their turn at the event loop."""
Token = Annotated[int, Between(0, below=2**31, becomes=NOTHING)]
Tokens = Annotated[list[Token], *listing(2_000_000)]
Prompt = fields.Text | Tokens


class CompletionRequest(SamplingFields):
    """A text to go on from, or to score."""

    harmless: ClassVar[frozenset[str]] = frozenset({"user"})
    limit: ClassVar[Cost] = replace(
        fields.CONVERSATION, containers=4 * MAX_PROMPTS, keys=4 * MAX_PROMPTS, values=1_500_000
    )
    fewer: ClassVar[str] = "fewer prompts or tokens per request"
    prompt: Prompt | Annotated[list[Prompt], *listing(MAX_PROMPTS)]
    max_tokens: sampling.MaxTokens | None = 16
    n: fields.NumAnswers | None = 1
    stop: Stops | None = None
    logprobs: fields.NumLikeliest | None = None
    echo: bool | None = False
    best_of: fields.NumAnswers | None = None
    suffix: fields.Text | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    stream_options: fields.Options | None = None
    return_token_ids: bool | None = False
    kept: ClassVar[frozenset[str]] = frozenset(
        "model max_tokens n stop logprobs echo stream stream_options return_token_ids temperature "
        "top_p top_k min_p seed logit_bias".split()
    )

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        given = body.get("prompt")
        if isinstance(given, list) and given and not isinstance(given[0], int):
            fields.at_most(len(given), MAX_PROMPTS, "prompts", "prompt")

    @property
    def num_new(self) -> int:
        """Most tokens to make; with 0 the prompt is only scored."""
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        fields.refuse(self.suffix, "suffix", "text cannot be inserted before a suffix here.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            fields.refuse(True, "best_of", "ask for n answers and choose yourself.")
        for name in ("presence_penalty", "frequency_penalty"):
            fields.refuse(getattr(self, name), name, "penalties are not offered; use 0.")
        if self.stream and (self.echo or len(self.prompts()) > 1):
            fields.refuse(True, "stream", "a stream takes one prompt, without echo.")
        if self.stream and self.max_tokens == 0:
            fields.refuse(True, "max_tokens", "there is nothing to stream; ask for at least 1.")

    def unheeded(self) -> set[str]:
        return fields.unknown_keys([self.stream_options or {}], "stream_options", "include_usage")

    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        if not given:
            raise InvalidInputError("must not be empty", path="prompt")
        return given  # type: ignore[return-value]


@dataclass(slots=True)
class _Call:
    """A request whose model is known and whose prompts are tokens."""

    body: CompletionRequest
    request: Request
    user: User
    target: SampleTarget
    chat_format: ChatFormat
    head: dict[str, Any]

    def generation(self, prompt: Sequence[int]) -> RunningSample:
        body = self.body
        stop = None if body.stop is None else [*self.chat_format.info.eos_token_ids, *body.stop]
        params = body.params(max(body.num_new, 1))
        topk = body.logprobs or 0
        scored = bool(body.echo and body.logprobs is not None)
        spec = SampleSpec(
            target=self.target,
            info=self.chat_format.info,
            prompt=prompt,
            params=params if stop is None else {**params, "stop": stop},
            num_samples=body.n or 1,
            prompt_logprobs=scored,
            topk_prompt=topk if scored else 0,
            topk_sample=topk,
        )
        return RunningSample(service_of(self.request), self.user, spec, self.request)

    def answer_text(self) -> AnswerText:
        return AnswerText(self.chat_format, None, self.body.stop or ())


@router.post("/completions")
async def completions(request: Request, user: CurrentUser) -> Response:
    body, headers = await fields.read(request, CompletionRequest, _understood)
    why = "there are no turns here to go on from; use /chat/completions."
    fields.refuse(trajectory_of(None, request), "trajectory", why)
    chat_formats = compat_of(request).chat_formats
    target, chat_format = await find_model(request, user, body.model)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    given = body.prompts()
    size = sum(len(prompt) for prompt in given)
    if size < LARGE_TEXT:
        prompts = _encoded(chat_format, given)
    else:
        prompts = await chat_formats.aside(user, size, _encoded, chat_format, given)
    del given
    body = body.lean()  # without the prompts: their tokens take a tenth of the room
    let_go_parsed(request.scope)
    call = _Call(body, request, user, target, chat_format, head)
    if body.logprobs is not None or body.return_token_ids:
        check_told(_num_told(body, prompts, chat_format), body.logprobs or 0)
    if body.stream:
        return await replies.streamed(_lines(call, prompts[0]), headers)
    made = await _together(call.generation(prompt).whole() for prompt in prompts)
    return replies.whole(await asyncio.to_thread(_whole, call, prompts, made), headers)


def _understood(body: CompletionRequest) -> tuple[CompletionRequest, dict[str, str]]:
    """A body that can be honoured, and the headers of its answer."""
    headers = fields.header_of(body.ignored())
    body.check()
    return body, headers


def _num_told(
    body: CompletionRequest, prompts: list[Sequence[int]], chat_format: ChatFormat
) -> int:
    """Most tokens that the answers tell, with their prompts where those are told too."""
    new = min(body.num_new, chat_format.info.max_context_length)
    told_prompts = body.echo or body.return_token_ids
    return (body.n or 1) * sum((len(p) if told_prompts else 0) + new for p in prompts)


async def _together(waiting: Iterable[Coroutine[Any, Any, SampleResponse]]) -> list[SampleResponse]:
    """All of them, or the first error, after which none goes on.

    A thousand that begin at once hold the event loop for half a second: others run between a few.
    """
    tasks: list[asyncio.Task[SampleResponse]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for one in waiting:
                tasks.append(group.create_task(one))
                if len(tasks) % BEGUN_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


def _encoded(chat_format: ChatFormat, prompts: list[str | list[int]]) -> list[Sequence[int]]:
    found: list[Sequence[int]] = [
        chat_format.tokens(prompt) if isinstance(prompt, str) else array("i", prompt)
        for prompt in prompts
    ]
    for index, tokens in enumerate(found):
        if not tokens:
            raise InvalidInputError("must not be empty", path=f"prompt[{index}]")
        check_length(tokens, "prompt", chat_format.info)  # here, beside the event loop
    return found


# ------------------------------------------------------------------------------------ whole


def _whole(call: _Call, prompts: list[Sequence[int]], made: list[SampleResponse]) -> bytes:
    choices: list[bytes] = []  # encoded one by one: as objects they are many times as large
    totals = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    for prompt, response in zip(prompts, made, strict=True):
        for sequence in response.sequences:
            choice = {"index": len(choices), **_choice(call, prompt, response, sequence)}
            choices.append(orjson.dumps(choice))
        counted = usage(len(prompt), response)
        for name in totals:
            totals[name] += 0 if call.body.max_tokens == 0 else counted[name]
    told = orjson.Fragment(b"[" + b",".join(choices) + b"]")
    return orjson.dumps({**call.head, "choices": told, "usage": totals})


def _choice(
    call: _Call, prompt: Sequence[int], response: SampleResponse, sequence: SampledSequence
) -> dict[str, Any]:
    body = call.body
    answer_text = call.answer_text()
    text = "".join(piece.text for piece in [*answer_text.feed(sequence.tokens), *answer_text.end()])
    silent = body.max_tokens == 0
    prompt_text = call.chat_format.tokenizer.decode(list(prompt)) if body.echo else ""
    rows = _prompt_rows(prompt, response) if body.echo else []
    if not silent:
        rows += _sampled_rows(sequence)
    choice: dict[str, Any] = {
        "text": prompt_text + ("" if silent else text),
        "finish_reason": "length" if silent else _finish(sequence),
        "logprobs": None if body.logprobs is None else _logprobs(call.chat_format, rows),
    }
    if body.return_token_ids:
        choice["prompt_token_ids"] = list(prompt)
        choice["token_ids"] = [] if silent else [int(token) for token in sequence.tokens]
    return choice


def _finish(sequence: SampledSequence) -> str:
    return "stop" if sequence.stop_reason == "stop" else "length"


Row = tuple[int, float | None, Sequence[tuple[int, float]]]
"""A token, its logprob, and the likeliest at its position."""


def _prompt_rows(prompt: Sequence[int], response: SampleResponse) -> list[Row]:
    scores = prompt_scores(response, prompt)
    topk = response.topk_prompt_logprobs or []
    return [
        (token, score, (topk[at] or []) if at < len(topk) else [])
        for at, (token, score) in enumerate(zip(prompt, scores, strict=True))
    ]


def _sampled_rows(sequence: SampledSequence) -> list[Row]:
    return [
        (int(token), float(logprob), likeliest(sequence, at))
        for at, (token, logprob) in enumerate(
            zip(sequence.tokens, sequence.logprobs or [], strict=True)
        )
    ]


def _logprobs(chat_format: ChatFormat, rows: Sequence[Row], start: int = 0) -> dict[str, Any]:
    texts = [token_text(chat_format.tokenizer, token) for token, _, _ in rows]
    offsets, at = [], start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [score for _, score, _ in rows],
        "top_logprobs": [
            {token_text(chat_format.tokenizer, token): score for token, score in top}
            if top
            else None
            for _, _, top in rows
        ],
        "text_offset": offsets,
        "token_ids": [token for token, _, _ in rows],
    }


# ------------------------------------------------------------------------------------ stream


async def _lines(call: _Call, prompt: Sequence[int]) -> AsyncIterator[bytes]:
    body, head = call.body, call.head
    speakers = [call.answer_text() for _ in range(body.n or 1)]
    generation = call.generation(prompt)
    said = [0] * len(speakers)
    prompts_told: set[int] = set()

    def chunk(index: int, text: str, rows: list[Row], finish: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": finish}
        choice["logprobs"] = (
            _logprobs(call.chat_format, rows, said[index]) if body.logprobs is not None else None
        )
        if body.return_token_ids:
            choice["token_ids"] = [token for token, _, _ in rows]
            if index not in prompts_told:
                prompts_told.add(index)
                choice["prompt_token_ids"] = list(prompt)
        said[index] += len(text)
        return event({**head, "choices": [choice]})

    # The likeliest tokens are known only when the sample is whole, and then they are told.
    late = bool(body.logprobs)
    async for new in generation.tokens():
        text = "".join(piece.text for piece in speakers[new.index].feed(new.tokens))
        rows: list[Row] = [
            (token, score, []) for token, score in zip(new.tokens, new.logprobs, strict=True)
        ]
        yield chunk(new.index, text, [] if late else rows)
    response = generation.result
    assert response is not None
    for index, sequence in enumerate(response.sequences):
        rest = "".join(piece.text for piece in speakers[index].end())
        yield chunk(index, rest, _sampled_rows(sequence) if late else [], _finish(sequence))
    if (body.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(len(prompt), response)})
    yield replies.DONE

"""OpenAI's `/chat/completions` and `/models`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import Field

from tinkex.chat.messages import Message, Tool, ToolCall
from tinkex.chat.reading import Piece
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.compat import fields, replies
from tinkex.server.compat.dependencies import compat_of
from tinkex.server.compat.dialogue import Asked, Conversing, Dialogue, ModelAnswer, converse
from tinkex.server.compat.fields import Stops
from tinkex.server.compat.model_names import ListedModel
from tinkex.server.compat.openai_shapes import chat_logprobs, usage
from tinkex.server.compat.replies import event
from tinkex.server.compat.running_sample import check_told
from tinkex.server.guard.auth import CurrentUser
from tinkex.server.http.handlers import answer
from tinkex.server.http.inputs import Text
from tinkex.types import SampledSequence, SampleResponse
from tinkex.types.fields.bounds import listing

router = APIRouter(tags=["openai"])
TEMPLATE_OPTIONS = frozenset({"enable_thinking", "reasoning_effort", "preserve_thinking"})


class _Part(fields.ForeignBody):
    type: Annotated[str, Field(max_length=100)]
    text: fields.Text | None = None


class _Function(fields.ForeignBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: fields.Text = ""


class _Call(fields.ForeignBody):
    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: _Function


class ChatMessage(fields.ForeignBody):
    role: Annotated[str, Field(max_length=40)]
    content: fields.Text | Annotated[list[_Part], *listing(fields.MAX_PARTS)] | None = None
    reasoning_content: fields.Text | None = None
    tool_calls: Annotated[list[_Call], *listing(fields.MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    function_call: Any = None
    audio: Any = None

    def message(self) -> Message:
        fields.refuse(self.function_call, "messages.function_call", "use tool_calls.")
        fields.refuse(self.audio, "messages.audio", "this server's models read text.")
        return Message(
            role=self.role,
            content=_words(self.content),
            reasoning=self.reasoning_content or "",
            tool_calls=tuple(
                ToolCall(name=c.function.name, arguments=c.function.arguments, call_id=c.id)
                for c in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class _Declared(fields.ForeignBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: fields.Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(fields.ForeignBody):
    type: Literal["function"]
    function: _Declared

    def tool(self) -> Tool:
        return Tool(
            name=self.function.name,
            description=self.function.description or "",
            parameters=self.function.parameters or {},
        )


class ChatRequest(Conversing):
    """A conversation to go on with."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        "user metadata store service_tier prompt_cache_key "
        "prompt_cache_retention safety_identifier verbosity".split()
    )
    kept: ClassVar[frozenset[str]] = frozenset(
        "model n stream stream_options logprobs top_logprobs return_token_ids".split()
    )
    messages: Annotated[list[ChatMessage], *listing(fields.MAX_MESSAGES, 1)]
    max_tokens: fields.NumTokens | None = None
    max_completion_tokens: fields.NumTokens | None = None
    n: fields.NumAnswers | None = 1
    stop: Stops | None = None
    logprobs: bool | None = False
    top_logprobs: fields.NumLikeliest | None = None
    tools: Annotated[list[ChatTool], *listing(fields.MAX_TOOLS)] | None = None
    tool_choice: fields.Word | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    stream_options: fields.Options | None = None
    reasoning_effort: Annotated[str, Field(max_length=40)] | None = None
    chat_template_kwargs: fields.Options | None = None
    separate_reasoning: bool | None = True
    return_token_ids: bool | None = False

    def unheeded(self) -> set[str]:
        # Each list by itself: a walk over all fields of all models takes three times as long.
        functions = [tool.function for tool in self.tools or ()]
        strict = {"tools.strict"} if any(function.strict for function in functions) else set()
        parts = [p for m in self.messages if isinstance(m.content, list) for p in m.content]
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        return strict.union(
            fields.extras_of(self.messages, "messages"),
            fields.extras_of(parts, "messages.content"),
            fields.extras_of(calls, "messages.tool_calls"),
            fields.extras_of([call.function for call in calls], "messages.tool_calls.function"),
            fields.extras_of(self.tools or (), "tools"),
            fields.extras_of(functions, "tools.function"),
            fields.unknown_keys([self.stream_options or {}], "stream_options", "include_usage"),
        )

    def option_fields(self) -> dict[str, str]:
        return {name: f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs or {}}

    def asked(self) -> Asked:
        self._check()
        tools = [] if self.tool_choice == "none" else [t.tool() for t in self.tools or ()]
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        limit = self.max_completion_tokens
        return Asked(
            model=self.model,
            messages=[message.message() for message in self.messages],
            tools=tools,
            options=options,
            params=self.params(self.max_tokens if limit is None else limit),
            stops=self.stop or (),
            num_answers=self.n or 1,
            topk=(self.top_logprobs or 0) if self.logprobs else 0,
            keep_reasoning=self.separate_reasoning is False,
            one_call=self.parallel_tool_calls is False,
        )

    def _check(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            fields.refuse(getattr(self, name), name, "penalties are not offered; use 0.")
        wanted = (self.response_format or {}).get("type", "text")
        if wanted != "text":
            raise NotSupportedError(
                f"{str(wanted)[:40]!r} cannot be enforced here; ask for it in words and check "
                "the answer.",
                path="response_format",
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise NotSupportedError(
                "a call cannot be forced here; use 'auto' or 'none'.", path="tool_choice"
            )
        if None not in (lengths := (self.max_tokens, self.max_completion_tokens)):
            if lengths[0] != lengths[1]:
                raise InvalidInputError(
                    f"says {lengths[0]} and max_completion_tokens {lengths[1]}: give one of them",
                    path="max_tokens",
                )
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("needs logprobs: true", path="top_logprobs")
        for name in self.chat_template_kwargs or {}:
            if name not in TEMPLATE_OPTIONS:
                raise InvalidInputError(
                    f"{name[:40]!r} is not known; known: {', '.join(sorted(TEMPLATE_OPTIONS))}",
                    path="chat_template_kwargs",
                )


def _words(content: str | list[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text"):
            raise NotSupportedError(
                f"content of type {part.type!r} is not taken; this server's models read text.",
                path="messages.content",
            )
    return "".join(part.text or "" for part in content)


# ------------------------------------------------------------------------------------ models


@router.get("/models")
async def list_models(request: Request, user: CurrentUser) -> Response:
    """Base models, aliases, and the caller's named checkpoints, runs and checkpoints."""
    found = await compat_of(request).names.listed(user)
    # Anthropic's clients list models at the same path, with this header.
    if "anthropic-version" in request.headers:
        return answer(
            {
                "data": [
                    {"type": "model", "id": target.name, "display_name": target.name}
                    for target in found
                ],
                "has_more": False,
                "first_id": found[0].name if found else None,
                "last_id": found[-1].name if found else None,
            }
        )
    return answer({"object": "list", "data": [_listed(model) for model in found]})


@router.get("/models/{name:path}")
async def get_model(request: Request, user: CurrentUser, name: Text) -> Response:
    target = await compat_of(request).names.target(user, name)
    return answer({**_model(name), "base_model": target.base_model, "path": target.model_path})


def _listed(model: ListedModel) -> dict[str, Any]:
    """A model as OpenAI lists it; a checkpoint is a fine-tune of its base, in vLLM's two words."""
    shown, checkpoint = _model(model.name), model.checkpoint
    if checkpoint is None:
        return {**shown, "root": model.name, "parent": None}
    fine_tuned = {"created": int(checkpoint.created_at), "owned_by": checkpoint.user_id}
    return {**shown, **fine_tuned, "root": checkpoint.path, "parent": checkpoint.base_model}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tinkex"}


@router.post("/embeddings")
async def embeddings(request: Request, user: CurrentUser) -> Response:
    raise NotSupportedError("Tinkex trains and samples language models; it makes no embeddings.")


# ------------------------------------------------------------------------------------ chat


@router.post("/chat/completions")
async def chat_completions(request: Request, user: CurrentUser) -> Response:
    body, dialogue, headers = await converse(request, user, ChatRequest)
    if body.logprobs or body.return_token_ids:
        spec, longest = dialogue.generation.spec, dialogue.chat_format.info.max_context_length
        length = min(spec.params.get("max_tokens", longest), longest)
        check_told(spec.num_samples * length, spec.topk_sample)
    turn = ChatAnswer(body, dialogue)
    if body.stream:
        return await replies.streamed(turn.lines(), headers)
    return replies.whole(await turn.whole(), headers)


class ChatAnswer:
    """An answered request: the whole object, or its chunks."""

    def __init__(self, body: ChatRequest, dialogue: Dialogue) -> None:
        self._body = body
        self._dialogue = dialogue
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self) -> bytes:
        response, answers = await self._dialogue.whole()
        return await self._dialogue.off_loop(response, self._whole, response, answers)

    def _whole(self, response: SampleResponse, answers: Sequence[ModelAnswer]) -> bytes:
        # One by one, so that many answers never stand in memory as objects.
        told = (orjson.dumps(self._choice(index, one)) for index, one in enumerate(answers))
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": orjson.Fragment(b"[" + b",".join(told) + b"]"),
            "usage": self._usage(response, answers),
        }
        if self._body.return_token_ids:
            body["prompt_token_ids"] = list(self._dialogue.prompt)
        return orjson.dumps(body)

    def _choice(self, index: int, answer: ModelAnswer) -> dict[str, Any]:
        said = answer.message
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.content if said.content or not said.tool_calls else None,
            "refusal": None,
        }
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [_call(call) for call in said.tool_calls]
        choice = {
            "index": index,
            "message": message,
            "finish_reason": answer.finish,
            "logprobs": self._logprobs(answer.sequence),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [int(token) for token in answer.sequence.tokens]
        return choice

    def _usage(self, response: SampleResponse, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        num_thoughts = sum(one.num_thoughts for one in answers)
        return usage(len(self._dialogue.prompt), response, num_thoughts)

    def _logprobs(self, sequence: SampledSequence | None) -> dict[str, Any] | None:
        if not self._body.logprobs or sequence is None:
            return None
        return chat_logprobs(self._dialogue.chat_format, sequence)

    async def lines(self) -> AsyncIterator[bytes]:
        body, dialogue = self._body, self._dialogue
        # The likeliest tokens are known only when the sample is whole, and then they are told.
        late = bool(body.top_logprobs)
        scored = not late and bool(body.logprobs or body.return_token_ids)
        num_calls = [0] * (body.n or 1)
        said = await replies.begun(dialogue.pieces())
        prompt = list(dialogue.prompt) if body.return_token_ids else None
        for index in range(body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""}, prompt=prompt)
            prompt = None  # told once
        async for index, pieces, new in said:
            told = None
            if scored and new.tokens:
                told = SampledSequence(
                    stop_reason="length", tokens=new.tokens, logprobs=new.logprobs
                )
            if pieces or told is not None:
                delta = _delta(pieces, num_calls[index])
                num_calls[index] += sum(piece.call is not None for piece in pieces)
                yield self._chunk(index, delta, told)
        response, answers = await dialogue.result()
        for index, made in enumerate(answers):
            told = made.sequence if late else None
            last = partial(self._chunk, index, {}, told, finish=made.finish)
            yield await dialogue.off_loop(response, last)
        if (body.stream_options or {}).get("include_usage"):
            counted = self._usage(response, answers)
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": []}
            yield event({**chunk, "usage": counted})
        yield replies.DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        sequence: SampledSequence | None = None,
        *,
        finish: str | None = None,
        prompt: list[int] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "finish_reason": finish,
            "logprobs": self._logprobs(sequence),
        }
        if self._body.return_token_ids and sequence is not None:
            choice["token_ids"] = [int(token) for token in sequence.tokens]
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return event(chunk if prompt is None else {**chunk, "prompt_token_ids": prompt})


def _delta(pieces: Sequence[Piece], num_calls: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for piece in pieces:
        if piece.call is not None:
            call = {"index": num_calls, **_call(piece.call)}
            delta.setdefault("tool_calls", []).append(call)
            num_calls += 1
        else:
            name = "content" if piece.kind == "content" else "reasoning_content"
            delta[name] = delta.get(name, "") + piece.text
    return delta


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id or f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }

"""Anthropic's `/v1/messages` and its count of tokens."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from tinkex.chat.messages import Message, Tool, ToolCall
from tinkex.chat.reading import Piece
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.compat import fields, refusals, replies
from tinkex.server.compat.blocks import BlockAnswer, pieces_of
from tinkex.server.compat.declared_tools import declared_tool, function_name
from tinkex.server.compat.dialogue import (
    Asked,
    Conversing,
    Dialogue,
    ModelAnswer,
    converse,
    understood,
)
from tinkex.server.compat.fields import Stops
from tinkex.server.guard.auth import CurrentUser
from tinkex.types import SampleResponse
from tinkex.types.fields.bounds import listing

router = APIRouter(prefix="/v1", tags=["anthropic"])
THINKING = ("enabled", "adaptive", "disabled")
BLOCK_FIELDS = "type text tool_use_id content id name input thinking signature data"
"""What blocks of all kinds have that is read, or said by us; the header names all else."""
CHOICE_FIELDS = "type name disable_parallel_tool_use"
Blocks = Annotated[list[dict[str, Any]], *listing(fields.MAX_PARTS)]


class _Turn(fields.ForeignBody):
    role: Annotated[str, Field(max_length=40)]
    content: fields.Text | Blocks


class MessagesRequest(Conversing):
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "service_tier", "context_management", "betas", "container"}
    )
    max_tokens: fields.NumTokens
    kept: ClassVar[frozenset[str]] = frozenset({"model", "stream"})
    messages: Annotated[list[_Turn], *listing(fields.MAX_MESSAGES, 1)]
    system: fields.Text | Blocks | None = None
    stop_sequences: Stops | None = None
    tools: Annotated[list[dict[str, Any]], *listing(fields.MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], *listing(fields.MAX_TOOLS)] | None = None

    def unheeded(self) -> set[str]:
        blocks = [b for m in self.messages if isinstance(m.content, list) for b in m.content]
        hidden = [b for b in blocks if b.get("type") == "redacted_thinking"]
        named = {"messages.content.redacted_thinking"} if hidden else set()
        system = self.system if isinstance(self.system, list) else []
        return named.union(
            fields.extras_of(self.messages, "messages"),
            fields.unknown_keys(blocks, "messages.content", BLOCK_FIELDS),
            fields.unknown_keys(system, "system", "type text"),
            fields.unknown_keys(self.tools or (), "tools", "type name description input_schema"),
            fields.unknown_keys([self.tool_choice or {}], "tool_choice", CHOICE_FIELDS),
            fields.unknown_keys([self.thinking or {}], "thinking", "type"),
            fields.unknown_keys([self.output_config or {}], "output_config", "format"),
        )

    def option_fields(self) -> dict[str, str]:
        return {"enable_thinking": "thinking"}

    def asked(self) -> Asked:
        fields.refuse(
            self.mcp_servers, "mcp_servers", "this server calls no tools; do it yourself."
        )
        if (kind := (self.thinking or {}).get("type", "enabled")) not in THINKING:
            known = ", ".join(THINKING)
            raise InvalidInputError(
                f"{str(kind)[:40]!r} is not known; known: {known}", path="thinking.type"
            )
        choice = (self.tool_choice or {}).get("type", "auto")
        declared = [] if choice == "none" else self.tools or []
        if choice not in ("auto", "none"):
            raise NotSupportedError(
                "a call cannot be forced here; use auto or none.", path="tool_choice"
            )
        if (self.output_config or {}).get("format"):
            raise NotSupportedError("cannot be enforced here; ask in words.", path="output_config")
        messages = [Message(role="system", content=_text(self.system, "system"))]
        messages = messages if self.system else []
        for index, turn in enumerate(self.messages):
            messages += _messages(turn, index)
        options: dict[str, Any] = {}
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.get("type") != "disabled"
        return Asked(
            model=self.model,
            messages=messages,
            tools=[_tool(one, f"tools[{at}]") for at, one in enumerate(declared)],
            options=options,
            params=self.params(self.max_tokens),
            stops=self.stop_sequences or (),
            one_call=self._one_call(),
        )

    def _one_call(self) -> bool:
        given = (self.tool_choice or {}).get("disable_parallel_tool_use", False)
        if not isinstance(given, bool):
            path = "tool_choice.disable_parallel_tool_use"
            raise InvalidInputError(f"must be true or false, got {str(given)[:40]!r}", path=path)
        return given


class CountRequest(MessagesRequest):
    max_tokens: fields.NumTokens = 1


def _tool(given: dict[str, Any], path: str) -> Tool:
    if (given.get("type") or "custom") != "custom":
        raise NotSupportedError(
            f"a tool of type {str(given.get('type'))[:40]!r} cannot run here; declare your own "
            "with a name and an input_schema.",
            path=path,
        )
    return declared_tool(given, path, schema="input_schema")


def _text(content: str | list[dict[str, Any]] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_block_text(block, path) for block in content)


def _taken(content: Any, path: str) -> str | list[dict[str, Any]] | None:
    """The content of a tool's result, which is a text or a list of blocks."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise InvalidInputError("must be a text or a list of blocks", path=path)


def _block_text(block: dict[str, Any], path: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise NotSupportedError(
            f"a block of type {str(block.get('type'))[:40]!r} is not taken; this server's models "
            "read text.",
            path=path,
        )
    text: str = block["text"]
    return text


def _messages(turn: _Turn, index: int) -> list[Message]:
    """The messages of one turn: each result of a tool is a message of its own."""
    path = f"messages[{index}].content"
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    results: list[Message] = []
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in turn.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = _text(_taken(block.get("content"), path), path)
            call_id = str(block.get("tool_use_id", ""))[:256]
            results.append(Message(role="tool", content=content, tool_call_id=call_id))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            call_id = str(block.get("id", ""))[:256]
            name = function_name(block.get("name"), f"{path}.name")
            calls.append(ToolCall(name=name, arguments=arguments, call_id=call_id))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            words.append(_block_text(block, path))
    if words or calls or thoughts:
        results.append(
            Message(
                role=turn.role,
                content="".join(words),
                reasoning="".join(thoughts),
                tool_calls=tuple(calls),
            )
        )
    return results


def _check_version(request: Request) -> None:
    if not request.headers.get("anthropic-version"):
        raise InvalidInputError(
            "the header anthropic-version is needed, for example 2023-06-01",
            path="anthropic-version",
        )


@router.post("/messages/count_tokens")
async def count_tokens(request: Request, user: CurrentUser) -> Response:
    _check_version(request)
    _, asked, ignored = await fields.read(request, CountRequest, understood)
    dialogue = await Dialogue.open(request, user, asked)
    headers = fields.header_of(ignored)
    return replies.whole({"input_tokens": len(dialogue.prompt)}, headers)


@router.post("/messages")
async def messages(request: Request, user: CurrentUser) -> Response:
    _check_version(request)
    body, dialogue, headers = await converse(request, user, MessagesRequest)
    answer = MessagesAnswer(body.model, dialogue)
    return await answer.reply(headers, is_stream=bool(body.stream))


class MessagesAnswer(BlockAnswer):
    """An answer in Anthropic's dialect."""

    failure = staticmethod(refusals.anthropic_error)

    def __init__(self, model: str, dialogue: Dialogue) -> None:
        super().__init__(dialogue)
        self._index = -1  # of the last block of a stream
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def whole(self, answer: ModelAnswer, response: SampleResponse) -> dict[str, Any]:
        return {
            **self._head,
            "content": [_block(piece) for piece in pieces_of(answer.message)],
            **self._ending(answer),
            "usage": self._usage(response),
        }

    def _ending(self, answer: ModelAnswer) -> dict[str, Any]:
        if answer.finish == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if answer.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        chat_format = self.dialogue.chat_format
        tokens = [int(token) for token in answer.sequence.tokens]
        if tokens and tokens[-1] in chat_format.end_ids:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        text = chat_format.tokenizer.decode(tokens)
        stops = self.dialogue.asked.stops
        ends = [(index, stop) for stop in stops if (index := text.find(stop)) >= 0]
        stop = min(ends)[1] if ends else None
        return {"stop_reason": "stop_sequence" if stop else "end_turn", "stop_sequence": stop}

    def _usage(self, response: SampleResponse) -> dict[str, Any]:
        # Anthropic's input_tokens leave out what was read from the cache; OpenAI's count it.
        cached = response.prompt_cache_hit_tokens or 0
        return {
            "input_tokens": len(self.dialogue.prompt) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": sum(len(sequence.tokens) for sequence in response.sequences),
        }

    def begun(self) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self.dialogue.prompt), "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def opened(self, piece: Piece) -> bytes:
        self._index += 1
        return self._of_block("start", content_block={**_block(piece), **_EMPTY[piece.kind]})

    def grown(self, piece: Piece) -> bytes:
        kind, field = _DELTAS[piece.kind]
        text = piece.text if piece.call is None else piece.call.arguments
        return self._of_block("delta", delta={"type": kind, field: text})

    def ended(self) -> bytes:
        return self._of_block("stop")

    def finished(self, answer: ModelAnswer, response: SampleResponse) -> bytes:
        ending, usage = self._ending(answer), self._usage(response)
        return _event("message_delta", delta=ending, usage=usage) + _event("message_stop")

    def _of_block(self, verb: str, **body: Any) -> bytes:
        return _event(f"content_block_{verb}", index=self._index, **body)


_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"thinking": ""},
    "content": {"text": ""},
    "tool_call": {"input": {}},
}
"""A block that begins in a stream, where it differs from a whole one."""
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _block(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return {
            "type": "tool_use",
            "id": f"toolu_{secrets.token_hex(12)}",
            "name": piece.call.name,
            "input": piece.call.parsed(),
        }
    if piece.kind == "reasoning":
        # The signature is a required field of Anthropic's type; nothing here signs thoughts.
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {"type": "text", "text": piece.text}


def _event(kind: str, **body: Any) -> bytes:
    return replies.event({"type": kind, **body}, kind)

"""OpenAI's `/responses`, as far as text and functions go.

Nothing is stored between calls: a conversation is sent whole, and `previous_response_id` is
refused.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

import orjson
from fastapi import APIRouter, Request, Response

from tinkex.chat.messages import Message, Tool, ToolCall
from tinkex.chat.reading import Piece
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.compat import fields, openai_shapes, replies
from tinkex.server.compat.blocks import BlockAnswer, pieces_of
from tinkex.server.compat.declared_tools import declared_tool, function_name
from tinkex.server.compat.dialogue import Asked, Conversing, Dialogue, ModelAnswer, converse
from tinkex.server.guard.auth import CurrentUser
from tinkex.types import SampleResponse
from tinkex.types.fields.bounds import listing

router = APIRouter(tags=["openai"])
TOOL_FIELDS = "type name description parameters strict"
ITEM_FIELDS = "type role content id status name arguments call_id output summary"
"""What items of all kinds have that is read, or said by us; the header names all else."""


class ResponsesRequest(Conversing):
    """A conversation in the form of OpenAI's second chat API."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        "user metadata store service_tier prompt_cache_key include truncation "
        "prompt_cache_retention safety_identifier max_tool_calls stream_options".split()
    )
    turns: ClassVar[str] = "input"
    kept: ClassVar[frozenset[str]] = frozenset(
        "model stream instructions tools tool_choice parallel_tool_calls temperature top_p "
        "max_output_tokens".split()
    )
    input: fields.Text | Annotated[list[dict[str, Any]], *listing(fields.MAX_MESSAGES)]
    instructions: fields.Text | None = None
    max_output_tokens: fields.NumTokens | None = None
    tools: Annotated[list[dict[str, Any]], *listing(fields.MAX_TOOLS)] | None = None
    tool_choice: fields.Word | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: fields.Word | None = None
    conversation: Any = None
    background: bool | None = None

    def unheeded(self) -> set[str]:
        strict = {"tools.strict"} if any(t.get("strict") for t in self.tools or ()) else set()
        items = self.input if isinstance(self.input, list) else []
        contents = [item.get("content") for item in items]
        parts = [p for c in contents if isinstance(c, list) for p in c if isinstance(p, dict)]
        return strict.union(
            fields.unknown_keys([self.reasoning or {}], "reasoning", "effort"),
            fields.unknown_keys([self.text or {}], "text", "format"),
            fields.unknown_keys(self.tools or (), "tools", TOOL_FIELDS),
            fields.unknown_keys(items, "input", ITEM_FIELDS),
            fields.unknown_keys(parts, "input.content", "type text annotations logprobs"),
        )

    def lean(self) -> Self:
        made = super().lean()
        if self.tools:  # the answer repeats them: as text they take a tenth of the room
            object.__setattr__(made, "tools", orjson.Fragment(orjson.dumps(self.tools)))
        return made

    def option_fields(self) -> dict[str, str]:
        return {"reasoning_effort": "reasoning.effort"}

    def asked(self) -> Asked:
        why = "nothing is kept between calls; send the whole conversation in input."
        fields.refuse(self.previous_response_id, "previous_response_id", why)
        fields.refuse(self.conversation, "conversation", why)
        fields.refuse(self.background, "background", "answers come while the caller waits.")
        form = (self.text or {}).get("format")
        if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
            raise NotSupportedError("only text can be had; check it yourself.", path="text.format")
        if self.tool_choice not in (None, "auto", "none"):
            raise NotSupportedError(
                "a call cannot be forced here; use 'auto' or 'none'.", path="tool_choice"
            )
        effort = (self.reasoning or {}).get("effort")
        declared = [] if self.tool_choice == "none" else self.tools or []
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        messages += _messages(self.input)
        return Asked(
            model=self.model,
            messages=messages,
            tools=[_tool(one, f"tools[{at}]") for at, one in enumerate(declared)],
            options={"reasoning_effort": str(effort)[:40]} if effort else {},
            params=self.params(self.max_output_tokens),
            one_call=self.parallel_tool_calls is False,
        )


def _tool(given: dict[str, Any], path: str) -> Tool:
    if given.get("type") != "function":
        raise NotSupportedError(
            f"a tool of type {str(given.get('type'))[:40]!r} cannot run here; declare functions.",
            path=path,
        )
    return declared_tool(given, path, schema="parameters")


def _messages(given: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    thoughts = ""  # of the answer that follows
    for index, item in enumerate(given):
        kind, path = item.get("type", "message"), f"input[{index}]"
        if kind == "message":
            role = str(item.get("role", "user"))[:40]
            content = _words(item.get("content"), f"{path}.content")
            thought = thoughts if role == "assistant" else ""
            messages.append(Message(role=role, content=content, reasoning=thought))
        elif kind == "function_call":
            call = ToolCall(
                name=function_name(item.get("name"), f"{path}.name"),
                arguments=str(item.get("arguments", "")),
                call_id=str(item.get("call_id", ""))[:256],
            )
            _add_call(messages, call, thoughts, path)
        elif kind == "function_call_output":
            content = _words(item.get("output"), f"{path}.output")
            call_id = str(item.get("call_id", ""))[:256]
            messages.append(Message(role="tool", content=content, tool_call_id=call_id))
        elif kind != "reasoning":
            raise NotSupportedError(
                f"an item of type {str(kind)[:40]!r} is not taken.", path=f"{path}.type"
            )
        thoughts = _thoughts(item, path) if kind == "reasoning" else ""
    return messages


def _thoughts(item: dict[str, Any], path: str) -> str:
    content = item.get("content")
    return "" if content is None else _words(content, f"{path}.content")


def _add_call(messages: list[Message], call: ToolCall, thoughts: str, path: str) -> None:
    """Calls that follow each other, or what was said before them, are one turn."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and not thoughts:
        num_calls = len(last.tool_calls) + 1
        fields.at_most(num_calls, fields.MAX_CALLS, "calls in one turn", path)
        messages[-1] = replace(last, tool_calls=(*last.tool_calls, call))
    else:
        messages.append(Message(role="assistant", reasoning=thoughts, tool_calls=(call,)))


TEXTS = ("input_text", "output_text", "text", "reasoning_text")


def _words(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInputError("must be a text or a list of texts", path=path)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            raise InvalidInputError("only text is taken", path=path)
        if not isinstance(part.get("text"), str):
            raise InvalidInputError("must be a text", path=f"{path}.text")
    return "".join(part["text"] for part in content)


@router.post("/responses")
async def responses(request: Request, user: CurrentUser) -> Response:
    body, dialogue, headers = await converse(request, user, ResponsesRequest)
    return await ResponsesAnswer(body, dialogue).reply(headers, is_stream=bool(body.stream))


class ResponsesAnswer(BlockAnswer):
    """An answer in the dialect of OpenAI's responses."""

    def __init__(self, body: ResponsesRequest, dialogue: Dialogue) -> None:
        super().__init__(dialogue)
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []  # what a stream has said
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": time.time(),
            "model": body.model,
            "instructions": body.instructions,
            "metadata": {},
            "error": None,
            "incomplete_details": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
        }

    def whole(self, answer: ModelAnswer, response: SampleResponse) -> dict[str, Any]:
        return self._whole([_item(piece) for piece in pieces_of(answer.message)], answer, response)

    def _whole(
        self, items: list[dict[str, Any]], answer: ModelAnswer, response: SampleResponse
    ) -> dict[str, Any]:
        usage = openai_shapes.usage(len(self.dialogue.prompt), response, answer.num_thoughts)
        is_cut = answer.finish == "length"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }

    def begun(self) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("created", response=response)

    def opened(self, piece: Piece) -> bytes:
        item = _item(piece if piece.call is not None else replace(piece, text=""))
        self._items.append(item)
        shown = {**item, "status": "in_progress"}
        if piece.call is not None:
            shown["arguments"] = ""
        events = self._event("output_item.added", output_index=len(self._items) - 1, item=shown)
        if piece.kind == "content":
            part = item["content"][0]
            events += self._of_last("content_part.added", content_index=0, part=part)
        return events

    def grown(self, piece: Piece) -> bytes:
        if piece.call is not None:
            return self._of_last("function_call_arguments.delta", delta=piece.call.arguments)
        self._items[-1]["content"][0]["text"] += piece.text
        if piece.kind == "reasoning":
            return self._of_last("reasoning_text.delta", content_index=0, delta=piece.text)
        return self._of_last("output_text.delta", content_index=0, delta=piece.text, logprobs=[])

    def ended(self) -> bytes:
        item, events = self._items[-1], b""
        if item["type"] == "message":
            part = item["content"][0]
            text = part["text"]
            events += self._of_last("output_text.done", content_index=0, text=text, logprobs=[])
            events += self._of_last("content_part.done", content_index=0, part=part)
        elif item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            events += self._of_last("function_call_arguments.done", **call)
        index = len(self._items) - 1
        return events + self._event("output_item.done", output_index=index, item=item)

    def finished(self, answer: ModelAnswer, response: SampleResponse) -> bytes:
        whole = self._whole(self._items, answer, response)
        return self._event(whole["status"], response=whole)

    def _of_last(self, kind: str, **body: Any) -> bytes:
        index = len(self._items) - 1
        return self._event(kind, output_index=index, item_id=self._items[-1]["id"], **body)

    def _event(self, kind: str, **body: Any) -> bytes:
        kind, number = f"response.{kind}", self._number
        self._number += 1
        return replies.event({"type": kind, "sequence_number": number, **body}, kind)


def _item(piece: Piece) -> dict[str, Any]:
    """An item of the output, as it is when it is complete."""
    if piece.call is not None:
        return {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": piece.call.name,
            "arguments": piece.call.arguments,
            "status": "completed",
        }
    if piece.kind == "reasoning":
        return {
            "id": f"rs_{secrets.token_hex(12)}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": piece.text}],
            "status": "completed",
        }
    part = {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }

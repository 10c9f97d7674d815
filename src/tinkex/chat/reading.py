"""What a reader of an assistant's words gives: pieces, in the order in which they are said.

A reader is fed text as it is generated and says of each part, as soon as that is certain, whether
it was thought, said, or a call of a tool. Reading everything at once is feeding it in one piece, so
streams and whole answers cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tinkex.chat.messages import Message, ToolCall

__all__ = ["PlainReader", "Piece", "Reader", "TaggedReader", "read_calls", "whole"]


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    call: ToolCall | None = None


class Reader(Protocol):
    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is a thought, as far as is known."""

    def feed(self, text: str) -> list[Piece]:
        """More of the text; gives what is certain by now."""

    def end(self) -> list[Piece]:
        """Nothing follows; gives what was held back."""


def whole(reader: Reader, text: str) -> Message:
    """An assistant's turn as a message."""
    return joined([*reader.feed(text), *reader.end()])


def joined(pieces: Iterable[Piece]) -> Message:
    kinds: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.call is not None:
            calls.append(piece.call)
        else:
            kinds[piece.kind].append(piece.text)
    return Message(
        role="assistant",
        content="".join(kinds["content"]),
        reasoning="".join(kinds["reasoning"]),
        tool_calls=tuple(calls),
    )


class PlainReader:
    """Everything is content."""

    is_thinking = False

    def feed(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def end(self) -> list[Piece]:
        return []


class TaggedReader:
    """Reasoning and tool calls stand between tags, as Qwen, SmolLM2 and most others have them.

    White space next to a tag belongs to the tag: templates put line breaks there. White space at
    the end of the whole answer is part of the answer.
    """

    def __init__(
        self,
        calls_of: Callable[[str], Sequence[ToolCall]] | None,
        *,
        thinking: tuple[str, str] | None = ("<think>", "</think>"),
        tool: tuple[str, str] = ("<tool_call>", "</tool_call>"),
        starts_thinking: bool = False,
    ) -> None:
        self._calls_of = calls_of
        self._thinking = thinking
        self._tool = tool
        self._mode: Literal["reasoning", "content", "tool"] = (
            "reasoning" if starts_thinking else "content"
        )
        self._held = ""
        self._searched = 0
        self._at_start = True
        self._spoke = False

    @property
    def is_thinking(self) -> bool:
        return self._mode == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._mode == "tool":  # cut off in the middle: what was said is not lost
            self._say(pieces, "content", self._tool[0] + self._held)
        elif self._mode == "content":
            self._say(pieces, "content", self._held)
        else:
            self._say(pieces, "reasoning", self._held.rstrip())
        self._held = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._mode == "tool":
            return self._read_tool(pieces)
        tags = self._tags()
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._say(pieces, self._mode, self._held[:at].rstrip())
            self._held = self._held[at + len(tag) :]
            self._enter(tag)
            return True
        certain = len(self._held) - _held_back(self._held, tags)
        self._say(pieces, self._mode, self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _tags(self) -> list[str]:
        if self._mode == "reasoning":
            assert self._thinking is not None
            return [self._thinking[1]]
        tags = [self._tool[0]] if self._calls_of is not None else []
        if self._thinking is not None and not self._spoke:
            tags.append(self._thinking[0])  # thinking comes first or not at all
        return tags

    def _enter(self, tag: str) -> None:
        if tag == self._tool[0]:
            self._mode, self._searched = "tool", 0
        else:
            opens = self._thinking is not None and tag == self._thinking[0]
            self._mode = "reasoning" if opens else "content"
        self._at_start = True

    def _read_tool(self, pieces: list[Piece]) -> bool:
        close = self._tool[1]
        at = self._held.find(close, max(self._searched - len(close), 0))
        if at < 0:
            self._searched = len(self._held)
            return False
        body, self._held = self._held[:at], self._held[at + len(close) :]
        self._mode, self._at_start = "content", True
        assert self._calls_of is not None
        calls = self._calls_of(body)
        if not calls:  # not a call after all: hand it on as it was said
            self._say(pieces, "content", self._tool[0] + body + close)
        pieces += [Piece("tool_call", call=call) for call in calls]
        self._spoke = True
        return True

    def _say(self, pieces: list[Piece], mode: str, text: str) -> None:
        if self._at_start:
            text = text.lstrip("\n") if mode == "content" else text.lstrip()
        if text:
            self._at_start = False
            self._spoke = self._spoke or mode == "content"
            pieces.append(Piece("content" if mode == "content" else "reasoning", text))


def _held_back(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end may belong to a tag: its beginning, and space before it."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                longest = max(longest, size)
                break
    before = text[: len(text) - longest] if longest else text
    return longest + len(before) - len(before.rstrip())


def read_calls(body: str) -> list[ToolCall]:
    """Calls written as JSON: one object, several, or a list, each with a name and arguments."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    rest = body.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            call = call_of(item)
            if call is None:
                return []
            calls.append(call)
        rest = rest[end:].lstrip(" \t\r\n,;")
    return calls


def call_of(item: Any) -> ToolCall | None:
    """Read a tool call from its JSON; None when it is something else."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text once more
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=item["name"], arguments=json.dumps(arguments, ensure_ascii=False))

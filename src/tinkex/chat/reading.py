"""What a reader of an assistant's words gives: pieces, in the order in which they are said.

A reader is fed text as it is generated and says of each part, as soon as that is certain, whether
it was thought, said, or a call of a tool. Reading everything at once is feeding it in one piece, so
streams and whole answers cannot differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from tinkex.chat.messages import Message, ToolCall

__all__ = ["PlainReader", "Piece", "Reader", "TaggedReader", "read_calls", "whole"]

MAX_CALL_TEXT = 1_000_000
"""Most characters that are read as calls; more of them are content."""
MAX_CALLS = 1024
"""Most calls in an answer, as in a message that is sent; what follows them is content."""
_CALL_TAGS = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"[ \t\r\n,;]*")


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


class MarkedText:
    """Text that comes in pieces, taken up to the next of some marks.

    An answer belongs to whoever trained the model, so no letter is looked at more than a few times,
    whatever was said: all that is kept here is the beginning of a mark.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def take(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """The text before the next mark, and the mark; empty when none is there yet."""
        match = _either(marks).search(self._text, self._at) if marks else None
        if match is None:
            end, mark = len(self._text) - self._num_begun(marks), ""
            start, self._at = self._at, end
        else:
            end, mark = match.start(), match[0]
            start, self._at = self._at, match.end()
        return self._text[start:end], mark

    def rest(self) -> str:
        """The beginning of a mark that never came whole."""
        rest, self._text, self._at = self._text[self._at :], "", 0
        return rest

    def _num_begun(self, marks: tuple[str, ...]) -> int:
        """How many letters at the end may begin a mark."""
        sizes = (
            size
            for mark in marks
            for size in range(len(mark) - 1, 0, -1)
            if self._text.endswith(mark[:size], self._at)
        )
        return max(sizes, default=0)


@lru_cache(maxsize=64)
def _either(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


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
        starts_thinking: bool = False,
    ) -> None:
        self._calls_of = calls_of
        self._thinking = thinking
        self._mode: Literal["reasoning", "content", "tool"] = (
            "reasoning" if starts_thinking else "content"
        )
        self._marked = MarkedText()
        self._held: list[str] = []  # white space that a tag may follow, or the inside of a call
        self._num_calls = 0
        self._at_start = True
        self._spoke = False

    @property
    def is_thinking(self) -> bool:
        return self._mode == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._marked.feed(text)
        pieces: list[Piece] = []
        mark = "at first"
        while mark:
            before, mark = self._marked.take(self._tags())
            if self._mode == "tool":
                self._held.append(before)
                if mark:
                    self._end_call(pieces)
            else:
                self._go_on(pieces, before)
                if mark:
                    self._enter(mark)
        return pieces

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        held = "".join(self._held) + self._marked.rest()
        if self._mode == "tool":  # cut off in the middle: what was said is not lost
            self._say(pieces, "content", _CALL_TAGS[0] + held)
        elif self._mode == "content":
            self._say(pieces, "content", held)
        else:
            self._say(pieces, "reasoning", held.rstrip())
        self._held = []
        return pieces

    def _tags(self) -> tuple[str, ...]:
        if self._mode == "tool":
            return (_CALL_TAGS[1],)
        if self._mode == "reasoning":
            assert self._thinking is not None
            return (self._thinking[1],)
        tags = () if self._calls_of is None else (_CALL_TAGS[0],)
        if self._thinking is not None and not self._spoke:
            tags = (*tags, self._thinking[0])  # thinking comes first or not at all
        return tags

    def _go_on(self, pieces: list[Piece], text: str) -> None:
        """Say the text, but for white space at its end, which waits for what follows."""
        said = text.rstrip()
        if said:
            self._say(pieces, self._mode, "".join(self._held) + said)
            self._held = []
        self._held.append(text[len(said) :])

    def _enter(self, tag: str) -> None:
        if tag == _CALL_TAGS[0]:
            self._mode = "tool"
        else:
            opens = self._thinking is not None and tag == self._thinking[0]
            self._mode = "reasoning" if opens else "content"
        self._held = []
        self._at_start = True

    def _end_call(self, pieces: list[Piece]) -> None:
        body, self._held = "".join(self._held), []
        self._mode, self._at_start = "content", True
        assert self._calls_of is not None
        is_room = len(body) <= MAX_CALL_TEXT and self._num_calls < MAX_CALLS
        calls = self._calls_of(body) if is_room else ()
        if not calls or self._num_calls + len(calls) > MAX_CALLS:
            # Not a call after all: handed on as it was said.
            self._say(pieces, "content", _CALL_TAGS[0] + body + _CALL_TAGS[1])
        else:
            self._num_calls += len(calls)
            pieces += [Piece("tool_call", call=call) for call in calls]
        self._spoke = True

    def _say(self, pieces: list[Piece], mode: str, text: str) -> None:
        if self._at_start:
            text = text.lstrip("\n") if mode == "content" else text.lstrip()
        if text:
            self._at_start = False
            self._spoke = self._spoke or mode == "content"
            pieces.append(Piece("content" if mode == "content" else "reasoning", text))


def read_calls(body: str) -> list[ToolCall]:
    """Calls written as JSON: one object, several, or a list, each with a name and arguments."""
    calls: list[ToolCall] = []
    body = body.strip() if len(body) <= MAX_CALL_TEXT else ""
    offset = 0
    while offset < len(body):
        try:
            value, offset = _DECODER.raw_decode(body, offset)
        except (ValueError, RecursionError):
            return []
        items = value if isinstance(value, list) else [value]
        read = [call_of(item) for item in items[:MAX_CALLS]]
        if None in read or len(items) + len(calls) > MAX_CALLS:
            return []
        calls += [call for call in read if call is not None]
        between = _BETWEEN.match(body, offset)
        offset = between.end() if between else offset
    return calls


def call_of(item: Any) -> ToolCall | None:
    """Read a tool call from its JSON; None when it is something else."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall.of(item["name"], arguments)

"""How each family of models speaks: what ends a turn, how it thinks aloud, how it calls tools.

A family is found by its chat template, not by the name of a model: a fine-tune keeps the template
and changes the name. To add one, write a row of `FAMILIES` and, when its tool calls are written in
a new way, a reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tinkex.chat.messages import MAX_NAME, Tool, ToolCall
from tinkex.chat.reading import (
    MAX_CALL_TEXT,
    MAX_CALLS,
    MarkedText,
    Piece,
    PlainReader,
    Reader,
    TaggedReader,
    call_of,
    read_calls,
)

__all__ = ["FAMILIES", "GENERIC", "ChatFamily", "Listening", "family_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The marks to look for in an answer: thoughts, calls, or neither."""

    prompt: str = ""
    """The text before the answer; some templates open the thinking in it."""
    calls: bool = True
    """False: no tools were offered, so nothing is a call."""
    thinking: bool = True
    """False: thoughts stay in the content, as the model wrote them."""
    tools: tuple[Tool, ...] = ()
    """The tools offered: where a call is bare text, the types of its arguments stand here."""

    @property
    def starts_thinking(self) -> bool:
        return self.thinking and self.prompt.rstrip().endswith("<think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    name: str
    says: str
    """How its answers read, for the docs."""
    marks: tuple[str, ...]
    """All of these stand in the chat template of a model of the family."""
    ends: tuple[str, ...]
    """Control tokens that end the assistant's turn, where the vocabulary has them."""
    reader: Callable[[Listening], Reader]
    heard: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    """Control tokens that its reader reads; every other one says nothing."""
    closings: tuple[str, ...] = ()
    """What besides `ends` closes a turn in the text of a conversation that went on."""


# ------------------------------------------------------------------------------------ Qwen 3.5


def _tagged_calls(body: str, texts: _DeclaredTexts) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`: values are bare text.

    A value that is JSON other than a text (a number, a list, true) is taken as that, which is how
    the template writes them, unless the tool declares a text.
    """
    body = body.strip()
    if not (body.startswith(_FUNCTION) and body.endswith(_END_FUNCTION)):
        return []
    name, opened, inside = body[len(_FUNCTION) : -len(_END_FUNCTION)].partition(">")
    if not opened or "\n" in name:
        return []
    declared = texts.of(name)
    arguments = {
        key: text if key in declared else _value(text) for key, text in _parameters(inside)
    }
    call = ToolCall.of(name, arguments)
    return [] if call is None else [call]


_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


def _parameters(inside: str) -> Iterator[tuple[str, str]]:
    """Keys and values, from left to right; the first one without an end is the last looked at."""
    start = 0
    while (start := inside.find(_PARAMETER, start)) >= 0:
        start += len(_PARAMETER)
        opened = inside.find(">", start, start + MAX_NAME + 1)
        key = inside[start : max(opened, start)]
        if not key or "\n" in key:
            continue
        end = inside.find(_END_PARAMETER, opened)
        if end < 0:
            return
        yield key, inside[opened + 1 : end].removeprefix("\n").removesuffix("\n")
        start = end


class _DeclaredTexts:
    """The arguments that tools declare to be texts, looked up once for each name of a tool."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._known: dict[str, set[str]] | None = None

    def of(self, name: str) -> set[str]:
        if self._known is None:
            self._known = {}
            for tool in self._tools:
                self._known.setdefault(tool.name, set()).update(tool.text_arguments())
        return self._known.get(name, set())


def _value(text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _qwen_reader(listening: Listening) -> Reader:
    texts = _DeclaredTexts(listening.tools)

    def calls_of(body: str) -> list[ToolCall]:
        return _tagged_calls(body, texts) or read_calls(body)

    return _tagged(calls_of, listening)


# ------------------------------------------------------------------------------------ Llama 3


class _LlamaReader:
    """A call is the whole answer: an object with a name and parameters, and nothing around it."""

    TAG = "<|python_tag|>"
    is_thinking = False

    def __init__(self) -> None:
        self._held: list[str] = []
        self._begun = ""
        self._is_content = self._is_call = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_content:
            return [Piece("content", text)] if text else []
        self._held.append(text)
        if self._is_call:
            return []
        begun = self._begun = (self._begun + text).lstrip()[: len(self.TAG)]
        if self.TAG.startswith(begun) or begun.startswith("{"):
            self._is_call = begun == self.TAG or begun.startswith("{")
            return []
        self._is_content = True
        return self._content()

    def end(self) -> list[Piece]:
        held = "".join(self._held)
        if calls := read_calls(held.strip().removeprefix(self.TAG)):
            return [Piece("tool_call", call=call) for call in calls]
        return self._content()

    def _content(self) -> list[Piece]:
        held, self._held = "".join(self._held), []
        return [Piece("content", held)] if held else []


# ------------------------------------------------------------------------------------ gpt-oss


class _HarmonyReader:
    """Turns are messages with a header: `<|channel|>NAME [to=functions.F]<|message|>BODY<|end|>`.

    The channel `analysis` is thinking, `final` is the answer, and `commentary` is a call when it
    has a recipient, else a word to the user before one.
    """

    OPENS = ("<|message|>",)
    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    _RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,256})")

    def __init__(self) -> None:
        self._marked = MarkedText()
        self._kind: str | None = None  # None: in a header
        self._header: list[str] = []
        self._function = ""
        self._arguments: list[str] = []
        self._num_calls = 0

    @property
    def is_thinking(self) -> bool:
        return self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._marked.feed(text)
        pieces: list[Piece] = []
        mark = "at first"
        while mark:
            is_header = self._kind is None
            before, mark = self._marked.take(self.OPENS if is_header else self.ENDS)
            if is_header:
                self._header.append(before)
                if mark:
                    self._open("".join(self._header))
            else:
                self._say(pieces, before)
                if mark:
                    self._close(pieces)
                    # A header that follows at once begins with the tag that ended this body.
                    self._header = [mark] if mark in self.ENDS[3:] else []
        return pieces

    def _open(self, header: str) -> None:
        recipient = self._RECIPIENT.search(header)
        channel = header.rpartition("<|channel|>")[2].strip()
        self._function = recipient[1] if recipient else ""
        if self._function:
            self._kind = "tool"
        else:
            self._kind = "reasoning" if channel.startswith("analysis") else "content"

    def _say(self, pieces: list[Piece], text: str) -> None:
        if self._kind == "tool":
            self._arguments.append(text)
        elif text:
            pieces.append(Piece("reasoning" if self._kind == "reasoning" else "content", text))

    def _close(self, pieces: list[Piece]) -> None:
        if self._kind == "tool":
            body, self._arguments = "".join(self._arguments), []
            call = self._read_call(body)
            pieces.append(Piece("content", body) if call is None else Piece("tool_call", call=call))
        self._kind = None

    def _read_call(self, body: str) -> ToolCall | None:
        if len(body) > MAX_CALL_TEXT or self._num_calls == MAX_CALLS:
            return None
        try:
            call = call_of({"name": self._function, "arguments": json.loads(body or "{}")})
        except (ValueError, RecursionError):
            return None
        self._num_calls += call is not None
        return call

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._kind is None:
            # Without any header it is a model that does not speak harmony: what it said is content.
            header = "".join(self._header) + self._marked.rest()
            is_said = "<|channel|>" not in header and not header.startswith("<|start|>")
            if is_said and header.strip():
                pieces.append(Piece("content", header))
            self._header = []
        else:
            self._say(pieces, self._marked.rest())
            self._close(pieces)
        return pieces


# ------------------------------------------------------------------------------------ the table


def _tagged(calls_of: Callable[[str], list[ToolCall]], listening: Listening) -> Reader:
    return TaggedReader(
        calls_of if listening.calls else None,
        thinking=("<think>", "</think>") if listening.thinking else None,
        starts_thinking=listening.starts_thinking,
    )


GENERIC = ChatFamily(
    name="generic",
    says="`<think>` around reasoning, JSON in `<tool_call>` tags",
    marks=(),
    ends=("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|endoftext|>"),
    reader=partial(_tagged, read_calls),
)

FAMILIES: tuple[ChatFamily, ...] = (
    ChatFamily(
        name="gpt-oss",
        says="harmony: channels `analysis`, `commentary` and `final`",
        marks=("<|channel|>", "<|message|>"),
        ends=("<|return|>", "<|call|>"),
        reader=lambda listening: _HarmonyReader(),
        closings=("<|end|>",),
        heard=(*_HarmonyReader.ENDS, *_HarmonyReader.OPENS, "<|constrain|>"),
    ),
    ChatFamily(
        name="qwen3.5",
        says="`<think>` around reasoning, `<function=...>` in `<tool_call>` tags",
        marks=("<|im_start|>", "<tool_call>", "<function="),
        ends=("<|im_end|>",),
        reader=_qwen_reader,
    ),
    ChatFamily(
        name="qwen3",
        says="`<think>` around reasoning, JSON in `<tool_call>` tags",
        marks=("<|im_start|>", "<tool_call>"),
        ends=("<|im_end|>",),
        reader=_qwen_reader,
    ),
    ChatFamily(
        name="llama3",
        says="a call is a JSON object with `name` and `parameters`, alone",
        marks=("<|start_header_id|>",),
        ends=("<|eot_id|>", "<|eom_id|>"),
        reader=lambda listening: _LlamaReader() if listening.calls else PlainReader(),
        heard=(_LlamaReader.TAG,),
    ),
    ChatFamily(
        name="smollm2",
        says="ChatML; a list of JSON calls in one pair of `<tool_call>` tags",
        marks=("<|im_start|>",),
        ends=("<|im_end|>",),
        reader=partial(_tagged, read_calls),
    ),
)


def family_of(template: str | None) -> ChatFamily:
    """The first family whose marks all stand in the template; the generic one when none has."""
    if template is not None:
        for family in FAMILIES:
            if all(mark in template for mark in family.marks):
                return family
    return GENERIC

"""How each family of models speaks: what ends a turn, how it thinks aloud, how it calls tools.

A family is found by its chat template, not by the name of a model: a fine-tune keeps the template
and changes the name. To add one, write a row of `FAMILIES` and, when its tool calls are written in
a new way, a reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tinkex.chat.messages import Tool, ToolCall
from tinkex.chat.reading import Piece, PlainReader, Reader, TaggedReader, call_of, read_calls

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

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL)


def _tagged_calls(body: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`: values are bare text.

    A value that is JSON other than a text (a number, a list, true) is taken as that, which is how
    the template writes them, unless the tool declares a text.
    """
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return []
    texts = {name for tool in tools if tool.name == match[1] for name in tool.text_arguments()}
    arguments = {
        key: text if key in texts else _value(text) for key, text in _PARAMETER.findall(match[2])
    }
    return [ToolCall(name=match[1], arguments=json.dumps(arguments, ensure_ascii=False))]


def _value(text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _qwen_reader(listening: Listening) -> Reader:
    def calls_of(body: str) -> list[ToolCall]:
        return _tagged_calls(body, listening.tools) or read_calls(body)

    return _tagged(calls_of, listening)


# ------------------------------------------------------------------------------------ Llama 3


class _LlamaReader:
    """A call is the whole answer: an object with a name and parameters, and nothing around it."""

    TAG = "<|python_tag|>"
    is_thinking = False

    def __init__(self) -> None:
        self._held = ""
        self._is_content = False

    def feed(self, text: str) -> list[Piece]:
        if self._is_content:
            return [Piece("content", text)] if text else []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or self.TAG.startswith(begun[: len(self.TAG)]):
            return []
        if begun.startswith(self.TAG):
            return []
        self._is_content = True
        held, self._held = self._held, ""
        return [Piece("content", held)]

    def end(self) -> list[Piece]:
        if self._is_content or not self._held:
            return []
        calls = read_calls(self._held.strip().removeprefix(self.TAG))
        if calls:
            return [Piece("tool_call", call=call) for call in calls]
        return [Piece("content", self._held)]


# ------------------------------------------------------------------------------------ gpt-oss


class _HarmonyReader:
    """Turns are messages with a header: `<|channel|>NAME [to=functions.F]<|message|>BODY<|end|>`.

    The channel `analysis` is thinking, `final` is the answer, and `commentary` is a call when it
    has a recipient, else a word to the user before one.
    """

    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
    _RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]{1,256})")

    def __init__(self) -> None:
        self._held = ""
        self._kind: str | None = None  # None: in a header
        self._function = ""
        self._arguments: list[str] = []

    @property
    def is_thinking(self) -> bool:
        return self._kind == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._kind is None:
            header, mark, rest = self._held.partition("<|message|>")
            if not mark:
                return False
            self._open(header)
            self._held = rest
            return True
        found = [(at, tag) for tag in self.ENDS if (at := self._held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._say(pieces, self._held[:at])
            # A header that follows at once begins with the tag that ended this body.
            self._held = self._held[at + (0 if tag in self.ENDS[3:] else len(tag)) :]
            self._close(pieces)
            return True
        keep = max(
            (n for tag in self.ENDS for n in range(1, len(tag)) if self._held.endswith(tag[:n])),
            default=0,
        )
        certain = len(self._held) - keep
        self._say(pieces, self._held[:certain])
        self._held = self._held[certain:]
        return False

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
            body = "".join(self._arguments)
            try:
                call = call_of({"name": self._function, "arguments": json.loads(body or "{}")})
            except (ValueError, RecursionError):
                call = None
            pieces.append(Piece("content", body) if call is None else Piece("tool_call", call=call))
            self._arguments = []
        self._kind = None

    def end(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._kind is None:
            # Without any header it is a model that does not speak harmony: what it said is content.
            if self._held.strip() and "<|channel|>" not in self._held:
                if not self._held.startswith("<|start|>"):
                    pieces.append(Piece("content", self._held))
        else:
            self._say(pieces, self._held)
            self._close(pieces)
        self._held = ""
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
        heard=(*_HarmonyReader.ENDS, "<|message|>", "<|constrain|>"),
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

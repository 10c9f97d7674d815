"""An answer is its model's, and so its owner's: reading it takes time in proportion to its length.

Seconds of this thread on a CPU are compared, not of a clock: eight times the text may take eight
times as long and a little more, and would take 64 times as long where each part is read again for
every other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import chat_models as models
import pytest

from tinkex.chat.detokenizer import Detokenizer
from tinkex.chat.families import FAMILIES, GENERIC, ChatFamily, Listening
from tinkex.chat.reading import MAX_CALL_TEXT, MAX_CALLS, PlainReader, Reader, joined

TIMES = 8
BAR = 3 * TIMES
SHORT = 8_000
"""Characters of the shorter text."""

# What is said again and again, and what was said once before it.
UNITS = {
    "unfinished parameters": (
        "<tool_call><function=f>",
        "<parameter=a>",
        "</function></tool_call>",
    ),
    "finished parameters": (
        "<tool_call><function=f>",
        "<parameter=a>1</parameter>",
        "</function></tool_call>",
    ),
    "ends of functions": ("<tool_call><function=f>", "</function> ", "x</tool_call>"),
    "names without an end": ("<tool_call><function=f>", "<parameter=" + "a" * 300, "</tool_call>"),
    "empty calls": ("", "<tool_call></tool_call>", ""),
    "calls": ("", '<tool_call>{"name": "f"}</tool_call>', ""),
    "calls in one pair of tags": ("<tool_call>", '{"name": "f"}, ', "</tool_call>"),
    "a call without an end": ("<tool_call>", '{"name": "f"}', ""),
    "begun tags": ("", "<tool_cal", ""),
    "thoughts": ("", "<think></think>", ""),
    "begun thoughts": ("<think>", "</think", ""),
    "spaces": ("a", " ", ""),
    "spaces in thoughts": ("<think>", "\n ", ""),
    "lists in lists": ("<tool_call>", "[", "</tool_call>"),
    "an object": ("{", '"a": {', ""),
    "objects": ("", '{"name": "f"}', ""),
    "tags of Llama": ("", "<|python_tag|>", ""),
    "calls of gpt-oss": ("", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", ""),
    "unfinished calls of gpt-oss": ("", "<|channel|>commentary to=functions.f<|message|>{", ""),
    "recipients": ("<|channel|>", "to=", ""),
    "headers": ("", "<|channel|>", ""),
    "bodies": ("<|message|>", "<|message|>", ""),
    "ends": ("<|message|>", "<|end|>", ""),
    "begun marks": ("<|message|>", "<|", ""),
}
READERS = {
    # Of families with the same reader, one.
    **{family.reader: family.name for family in (*FAMILIES, GENERIC)},
    lambda listening: PlainReader(): "plain",
}


def _seconds(work: Callable[[], None]) -> float:
    """Of this thread's CPU, so that a busy machine does not matter."""
    before = time.thread_time()
    work()
    return time.thread_time() - before


def _assert_linear(work: Callable[[int], Callable[[], None]]) -> None:
    """Measure again where it looks otherwise: 64 times as long stays so, a disturbance does not."""
    told = []
    for _ in range(5):
        long = _seconds(work(TIMES * SHORT))
        if long < 0.02:  # the clock itself is most of it
            return
        short = min(_seconds(work(SHORT)) for _ in range(2))
        if long < BAR * short:
            return
        told.append(f"{short:.4f} s, then {long:.4f} s")
    raise AssertionError("; ".join(told))


@pytest.mark.parametrize("size", [None, 4], ids=["whole", "in pieces"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("make", READERS, ids=READERS.values())
def test_reading_an_answer_takes_time_in_proportion_to_it(
    make: Callable[[Listening], Reader], unit: str, size: int | None
) -> None:
    before, again, after = UNITS[unit]

    def work(length: int) -> Callable[[], None]:
        text = before + again * (length // len(again)) + after
        cut = size or len(text)
        parts = [text[at : at + cut] for at in range(0, len(text), cut)]

        def read() -> None:
            reader = make(Listening(tools=(models.WEATHER,)))
            said = [piece for part in parts for piece in reader.feed(part)]
            joined([*said, *reader.end()])

        return read

    _assert_linear(work)


def test_tokens_that_are_no_text_are_decoded_in_proportion_to_their_number() -> None:
    """A model that writes beginnings of characters, and no end of one."""
    tokenizer = models.tokenizer(None)
    half = tokenizer.encode("\U0001f600")[0]

    def work(length: int) -> Callable[[], None]:
        def decode() -> None:
            stream = Detokenizer(tokenizer)
            said = [stream.feed([half]) for _ in range(length // 10)]
            assert len("".join(said) + stream.end()) > length // 20

        return decode

    _assert_linear(work)


# --------------------------------------------------------------------------------- what is a call


def _said(family: ChatFamily, text: str) -> tuple[str, int]:
    reader = family.reader(Listening(tools=(models.WEATHER,)))
    message = joined([*reader.feed(text), *reader.end()])
    return message.content, len(message.tool_calls)


TAGGED = next(family for family in FAMILIES if family.name == "qwen3.5")
HARMONY = next(family for family in FAMILIES if family.name == "gpt-oss")
LLAMA = next(family for family in FAMILIES if family.name == "llama3")


def _as_call(family: ChatFamily, arguments: str) -> str:
    if family is HARMONY:
        return f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>"
    call = f'{{"name": "f", "parameters": {arguments}}}'
    return call if family is LLAMA else f"<tool_call>{call}</tool_call>"


@pytest.mark.parametrize("family", [TAGGED, HARMONY, LLAMA], ids=lambda family: family.name)
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": ' * 65 + "1" + "}" * 65,
        '{"a": ' * 990 + "1" + "}" * 990,
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"a": "' + "x" * MAX_CALL_TEXT + '"}',
    ],
    ids=["half a character", "a key", "65 levels", "990 levels", "100,000 levels", "a megabyte"],
)
def test_what_cannot_be_sent_back_as_a_call_is_content(family: ChatFamily, arguments: str) -> None:
    text = _as_call(family, arguments)
    content, num_calls = _said(family, text)
    assert num_calls == 0
    assert content == (arguments if family is HARMONY else text)


@pytest.mark.parametrize("family", [TAGGED, HARMONY, LLAMA], ids=lambda family: family.name)
@pytest.mark.parametrize(
    "arguments",
    ['{"a": 18446744073709551616}', '{"a": "\\ud83d\\ude00"}', '{"a": ' * 64 + "1" + "}" * 64],
    ids=["a large number", "a character in two parts", "64 levels"],
)
def test_a_call_may_hold_whatever_can_be_sent_back(family: ChatFamily, arguments: str) -> None:
    assert _said(family, _as_call(family, arguments)) == ("", 1)


@pytest.mark.parametrize("family", [TAGGED, HARMONY], ids=lambda family: family.name)
def test_calls_beyond_what_a_message_holds_are_content(family: ChatFamily) -> None:
    content, num_calls = _said(family, _as_call(family, "{}") * (MAX_CALLS + 2))
    assert num_calls == MAX_CALLS
    assert content == (("{}" if family is HARMONY else _as_call(family, "{}")) * 2)

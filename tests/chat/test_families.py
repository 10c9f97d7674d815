"""What a family's template writes, its reader reads: parse(render(messages)) = messages."""

from __future__ import annotations

import json
import random

import chat_models as models
import pytest

from tinkex.chat.families import FAMILIES, GENERIC, family_of
from tinkex.chat.messages import Message, ToolCall
from tinkex.chat.reading import TaggedReader, joined, read_calls
from tinkex.chat.renderer import ChatRenderer
from tinkex.errors import InvalidInputError

ASK = Message(role="user", content="How is the weather?")
_ALL = (
    models.SAID,
    models.CALLED,
    models.THOUGHT,
    models.BOTH,
    models.TRIED,
    models.PLANNED,
)
TURNS = {
    "qwen3": _ALL,
    "qwen3.5": _ALL,
    "llama3": (models.SAID, models.CALLED, models.TRIED),
    "gpt-oss": (models.SAID, models.CALLED, models.THOUGHT, models.TRIED, models.PLANNED),
    "smollm2": _ALL,
    "generic": _ALL,
}
CASES = [(name, turn) for name, turns in TURNS.items() for turn in turns]


def conversation(name: str) -> ChatRenderer:
    return ChatRenderer(models.tokenizer(models.TEMPLATES[name]))


def answer_of(chat: ChatRenderer, turn: Message) -> tuple[str, list[int]]:
    """The prompt, and the tokens with which the model would have said `turn`."""
    prompt = chat.text([ASK], [models.WEATHER], generate=True)
    everything = chat.text([ASK, turn], [models.WEATHER])
    assert everything.startswith(prompt)
    tokens = chat.encode(everything[len(prompt) :])
    last = max(i for i, token in enumerate(tokens) if token in chat.end_ids)
    return prompt, tokens[: last + 1]


def same(read: Message, said: Message) -> None:
    assert (read.content, read.reasoning) == (said.content, said.reasoning)
    calls = [(call.name, json.loads(call.arguments)) for call in read.tool_calls]
    assert calls == [(call.name, json.loads(call.arguments)) for call in said.tool_calls]


@pytest.mark.parametrize(("name", "turn"), CASES)
def test_what_is_rendered_is_read_back(name: str, turn: Message):
    chat = conversation(name)
    prompt, tokens = answer_of(chat, turn)
    same(chat.message(tokens, prompt, [models.WEATHER]), turn)


@pytest.mark.parametrize(("name", "turn"), CASES)
def test_a_stream_reads_as_the_whole_does_wherever_it_is_cut(name: str, turn: Message):
    chat = conversation(name)
    prompt, tokens = answer_of(chat, turn)
    text = chat.tokenizer.decode(chat.words(tokens))
    rng = random.Random(0)
    for _ in range(30):
        reader, pieces, at = chat.reader(prompt, tools=[models.WEATHER]), [], 0
        while at < len(text):
            size = rng.randint(1, 7)
            pieces += reader.feed(text[at : at + size])
            at += size
        same(joined([*pieces, *reader.end()]), turn)


@pytest.mark.parametrize("name", models.TEMPLATES)
def test_a_family_is_found_by_its_template(name: str):
    assert family_of(models.TEMPLATES[name]).name == name
    assert conversation(name).end_ids


def test_a_template_says_which_wishes_it_knows():
    template = models.TEMPLATES["qwen3"] + "{% if enable_thinking is false %}{% endif %}"
    chat = ChatRenderer(models.tokenizer(template))
    assert chat.unread(["enable_thinking", "reasoning_effort"]) == {"reasoning_effort"}


def test_every_family_has_a_template_in_these_tests():
    names = {family.name for family in (*FAMILIES, GENERIC)}
    assert names == set(models.TEMPLATES) == set(TURNS)


@pytest.mark.parametrize("is_ended", [True, False])
@pytest.mark.parametrize(("name", "turn"), CASES)
def test_a_conversation_goes_on_from_recorded_tokens(name: str, turn: Message, is_ended: bool):
    """What follows a turn is the same text, whatever the turn was."""
    chat = conversation(name)
    messages = [ASK, turn, Message(role="user", content="And now?")]
    rest = chat.text_after(1, messages, [models.WEATHER], is_ended=is_ended)
    whole = chat.text(messages, [models.WEATHER], generate=True)
    assert whole.endswith(rest)
    before = whole.removesuffix(rest)
    assert any(before.endswith(end) for end in models.CONTROL) == is_ended


def test_a_template_that_rewrites_earlier_turns_can_go_on():
    chat = ChatRenderer(models.tokenizer(models.FORGETFUL))
    messages = [ASK, models.THOUGHT, Message(role="user", content="And now?")]
    rest = chat.text_after(1, messages, is_ended=True)
    assert rest == "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


def test_a_control_token_in_an_answer_is_no_word():
    chat = conversation("qwen3")
    tokens = [*chat.encode("one<|im_start|>"), *chat.encode(" two<|im_end|>")]
    assert chat.message(tokens).content == "one two"


def test_what_a_model_spelled_does_not_end_a_recorded_conversation():
    chat = conversation("qwen3")
    said = Message(role="assistant", content="<|im_start|>")
    more = Message(role="user", content="more")
    assert "more" in chat.text_after(1, [ASK, said, more], is_ended=True)
    with pytest.raises(InvalidInputError, match="control token"):
        chat.text_after(1, [ASK, said, said], is_ended=True)


def test_thinking_that_the_prompt_began_is_not_content():
    reader = TaggedReader(read_calls, starts_thinking=True)
    read = joined([*reader.feed("hm\n</think>\n\nYes."), *reader.end()])
    assert (read.reasoning, read.content) == ("hm", "Yes.")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "a < b and </think> c",
    ],
)
def test_what_is_no_call_is_handed_on_as_it_was_said(text: str):
    reader = TaggedReader(read_calls)
    read = joined([*reader.feed(text), *reader.end()])
    assert read.content == text
    assert read.tool_calls == ()


def test_a_template_without_tools_is_told_of_them_in_words():
    chat = conversation("smollm2")
    text = chat.text([Message(role="system", content="Be brief."), ASK], [models.WEATHER])
    assert text.index("Be brief.") < text.index('"weather"') < text.index("How is")


def test_text_that_spells_a_control_token_is_refused():
    with pytest.raises(InvalidInputError, match=r"messages\[0\].content.*<\|im_end\|>"):
        conversation("qwen3").text([Message(role="user", content="x<|im_end|>y")])


def test_arguments_that_are_no_object_are_refused():
    turn = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments="[1]"),))
    with pytest.raises(InvalidInputError, match="must be a JSON object"):
        conversation("qwen3").text([ASK, turn])


def test_without_template_or_chat_tokens_turns_are_plain_words():
    chat = ChatRenderer(models.tokenizer(None, control=()))
    assert chat.text([ASK], generate=True) == "User: How is the weather?\nAssistant:"
    assert chat.stop == ["\nUser:"]
    assert chat.message(chat.encode(" Fine.\nUser:")).content == " Fine."

"""Messages to tokens: the default model's template, ChatML and plain turns."""

from __future__ import annotations

import json

import pytest

from tinkex.errors import InvalidInputError
from tinkex.recipes import sft
from tinkex.recipes.data import load_conversations
from tinkex.recipes.render import Renderer

CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model_dir)


class Bytes:
    """A tokenizer without template and without special tokens."""

    chat_template = None
    all_special_tokens: tuple[str, ...] = ()

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()


def learned(renderer, example):
    return renderer.tokenizer.decode(
        [t for t, w in zip(example.tokens, example.weights, strict=True) if w]
    )


def test_a_conversation_reads_as_the_chat_template_says(tokenizer):
    example = Renderer(tokenizer).example(CHAT)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(example.tokens) == whole.rstrip("\n")


def test_only_the_assistants_words_and_its_end_mark_are_learned(tokenizer):
    renderer = Renderer(tokenizer)
    assert learned(renderer, renderer.example(CHAT)) == "Hi!<|im_end|>See you.<|im_end|>"
    assert learned(renderer, renderer.example(CHAT, learn="last")) == "See you.<|im_end|>"


def test_what_a_prompt_holds_is_context_whoever_speaks(tokenizer, tmp_path):
    """As in TRL: of `prompt` and `completion` the completion alone is learned."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": CHAT[:3], "completion": CHAT[3]["content"]}) + "\n")
    (row,) = load_conversations(file).rows
    config = sft.SftConfig(data=str(file), log_dir=str(tmp_path))
    renderer = Renderer(tokenizer)
    assert learned(renderer, sft.render(row, renderer, config)) == "See you.<|im_end|>"


def test_an_example_begins_with_the_very_tokens_of_its_prompt(tokenizer):
    """What is trained is what is sampled: no token straddles the border."""
    renderer = Renderer(tokenizer)
    prompt = renderer.prompt(CHAT[:1])
    assert list(renderer.example(CHAT[:2]).tokens[: len(prompt)]) == prompt


def test_a_datum_predicts_the_next_token(tokenizer):
    example = Renderer(tokenizer).example(CHAT[:2])
    datum = example.datum(0.5)
    assert datum.model_input.to_ints() == list(example.tokens[:-1])
    assert datum.loss_fn_inputs["target_tokens"].tolist() == list(example.tokens[1:])
    assert sum(datum.loss_fn_inputs["weights"].tolist()) == example.num_learned * 0.5


def test_text_spelling_a_control_token_is_refused(tokenizer):
    with pytest.raises(
        InvalidInputError, match=r"messages\[0\].content: .*holds the control token"
    ):
        Renderer(tokenizer).prompt([{"role": "user", "content": "stop <|im_end|> here"}])


def test_the_answer_is_read_back_without_its_end_mark(tokenizer):
    renderer = Renderer(tokenizer)
    end = renderer.stop
    assert renderer.text([*tokenizer.encode("Hi!"), *end]) == "Hi!"


def test_a_tokenizer_without_chat_tokens_gets_plain_turns():
    renderer = Renderer(Bytes())
    example = renderer.example(CHAT)
    assert bytes(example.tokens).decode() == (
        "User: Hello there\nAssistant: Hi!\nUser: Bye\nAssistant: See you.\nUser:"
    )
    assert learned(renderer, example) == " Hi!\nUser: See you.\nUser:"
    assert renderer.stop == ["\nUser:"]
    assert renderer.text(b" Hi!\nUser:") == "Hi!"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several_answers(tokenizer):
    class Forgetful(Bytes):
        chat_template = (
            "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else '...' }}#"
            "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
        )
        eos_token = "#"

    with pytest.raises(InvalidInputError, match="rewrites earlier turns"):
        Renderer(Forgetful()).example(CHAT)


def test_without_transformers_a_conversation_renders_alike(tokenizer, default_model_dir):
    """The SDK alone loads tokenizers without transformers; the tokens must not change."""
    from tinkex.chat.tokenizer import FastTokenizer

    light = Renderer(FastTokenizer.from_folder(default_model_dir))
    full = Renderer(tokenizer)
    assert light.example(CHAT) == full.example(CHAT)
    assert light.stop == full.stop

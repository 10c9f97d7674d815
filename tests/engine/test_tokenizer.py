"""The default model's tokenizer, rebuilt from GGUF metadata, is the original one."""

from __future__ import annotations

import pytest
import torch

from tinkex.engine.device.backend import load_decoder
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.tokenizer import tokenizer_json
from tinkex.errors import NotSupportedError


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model_dir)


def test_every_text_comes_back(tokenizer):
    text = "Hello 1234 world!  It's  3.14\n\tdef f(x):\n    return x**2 日本 🤗 é"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_one_by_one(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x 2024")] == ["x", " ", *"2024"]


def test_special_tokens_are_single_ids(tokenizer):
    assert len(tokenizer) == 49152
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert tokenizer.eos_token_id == 2


def test_the_chat_template_is_chatml(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_model_and_its_tokenizer_speak_the_same_ids(tokenizer, default_model_dir):
    """Ids off by one, or split otherwise, would make the answer noise."""
    decoder = load_decoder(str(default_model_dir))
    tokens = torch.tensor(tokenizer.encode("The capital of France is"))
    with torch.no_grad():
        attend = PackedCausal([0, len(tokens)])
        hidden_TD = decoder.forward(tokens, torch.arange(len(tokens)), attend)
        best = int(decoder.head(hidden_TD[-1:]).argmax())
    assert tokenizer.decode([best]) == " Paris"


def test_a_pre_tokenizer_without_written_rules_is_refused():
    with pytest.raises(NotSupportedError, match="qwen2"):
        tokenizer_json({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"})

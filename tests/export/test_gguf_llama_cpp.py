"""llama.cpp runs what we export: the same greedy answers, log-probabilities and token ids.

llama.cpp comes as the wheel `xllamacpp` into an environment of its own. Its KV cache is
float16 whatever the file, which is worth about 1e-2 nats here.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from cached_venv import cached_python
from gguf_models import FAMILIES, TEXT, make
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tinkex.export.gguf import write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(1200)]
VERSION = "2026.10.11549"
NUM_TOKENS = 12
END_TOKENS = [0, 2]  # <|endoftext|> and <|im_end|>, here and in SmolLM2.


@pytest.fixture(scope="module")
def llama_cpp():
    """`ask(file, prompts, texts)` -> what llama.cpp answers."""
    python = cached_python(f"xllamacpp-{VERSION}", (f"xllamacpp=={VERSION}",))

    def ask(file, prompts, texts):
        asked = {"file": str(file), "prompts": prompts, "texts": texts, "num_tokens": NUM_TOKENS}
        program = [python, Path(__file__).with_name("llama_cpp.py")]
        done = subprocess.run(
            program, input=json.dumps(asked), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return ask


def greedy(model, prompt):
    """The answer of transformers, with its log-probabilities; end tokens are never said."""
    tokens, said = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), -1)
            allowed = logprobs.clone()
            allowed[END_TOKENS] = -torch.inf
            tokens.append(int(allowed.argmax()))
            said.append((tokens[-1], float(logprobs[tokens[-1]])))
    return said


def compare(answers, expected, atol):
    for got, wanted in zip(answers, expected, strict=True):
        assert [token for token, _ in got] == [token for token, _ in wanted]
        known = [(a, b) for (_, a), (_, b) in zip(got, wanted, strict=True) if a is not None]
        assert known
        assert [a for a, _ in known] == pytest.approx([b for _, b in known], abs=atol)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_llama_cpp_answers_as_the_model_does(family, llama_cpp, tmp_path):
    model = make(family, tmp_path)
    write_gguf(tmp_path, tmp_path / "m.gguf", number_type="f32")
    prompts = [list(range(3, 90, 3)), [7, 300, 41]]
    texts = [TEXT, f"<|im_start|>user\n{TEXT}<|im_end|>"]
    got = llama_cpp(tmp_path / "m.gguf", prompts, texts)
    compare(got["answers"], [greedy(model, prompt) for prompt in prompts], atol=0.05)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert got["tokens"] == [tokenizer.encode(text).ids for text in texts]


@pytest.mark.parametrize("number_type", ["f16", "q8_0"])
def test_llama_cpp_answers_as_the_default_model_does(
    number_type, llama_cpp, default_model_dir, tmp_path
):
    write_gguf(default_model_dir, tmp_path / "m.gguf", number_type=number_type)
    tokenizer = Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    got = llama_cpp(tmp_path / "m.gguf", [tokenizer.encode(chat).ids], [chat, TEXT])
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    expected = [greedy(model, tokenizer.encode(chat).ids)]
    compare(got["answers"], expected, atol=0.05 if number_type == "f16" else 0.2)
    assert got["tokens"] == [tokenizer.encode(text).ids for text in (chat, TEXT)]

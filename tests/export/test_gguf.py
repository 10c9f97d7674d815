"""A GGUF file computes what its folder computes, in our reader and in transformers'.

llama.cpp itself is asked in `test_gguf_llama_cpp.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datums import datum
from gguf_models import FAMILIES, TEXT, make, write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tinkex import AdamParams, ModelInput, ServiceClient
from tinkex.cli.app import run as run_cli
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.base_model import config_from_gguf
from tinkex.engine.model.gguf import GgufFile
from tinkex.engine.model.tokenizer import tokenizer_json
from tinkex.engine.model.weights import GgufWeights
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.export.gguf import write_gguf

TOKENS = torch.arange(3, 60, 3)
READ_BACK = sorted(set(FAMILIES) - {"llama3"})  # Our reader refuses files with rope factors.


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0].float()


@pytest.mark.parametrize("family", READ_BACK)
def test_our_reader_gets_every_tensor_back_to_the_bit(family, tmp_path):
    model = make(family, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", number_type="f32")
    file = GgufFile(tmp_path / "m.gguf")
    back = GgufWeights(file, config_from_gguf(file))
    wanted = model.state_dict()
    if family == "llama-tied":
        wanted.pop("lm_head.weight")
    assert set(back.names()) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(back.read(name), tensor), name


@pytest.mark.parametrize("family", READ_BACK)
def test_our_decoder_computes_the_same_from_the_file(family, tmp_path):
    model = make(family, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", number_type="f32")
    decoder = load_decoder(str(tmp_path / "m.gguf"))
    with torch.no_grad():
        hidden_TD = decoder.forward(
            TOKENS, torch.arange(len(TOKENS)), PackedCausal([0, len(TOKENS)])
        )
        torch.testing.assert_close(decoder.head(hidden_TD), logits_of(model), atol=1e-4, rtol=1e-4)


# transformers 5.22 reads neither rope scaling nor its factors from GGUF; llama.cpp does.
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama3", "llama-linear"}))
@pytest.mark.parametrize(("number_type", "atol"), [("f32", 1e-4), ("f16", 2e-2)])
def test_transformers_computes_the_same_from_the_file(family, number_type, atol, tmp_path):
    """float16 keeps 11 bits: 5e-4 of each weight, 2e-2 of logits that span a hundred."""
    model = make(family, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", number_type=number_type)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), atol=atol, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_adapter_on_a_tied_head_gets_a_head_of_its_own(start_server, tmp_path):
    """`tinkex export --to gguf`: what the file computes is what the sampler computed."""
    make("llama-tied", tmp_path / "model")
    (tmp_path / "server").mkdir()
    tokens = TOKENS.tolist()
    with (
        start_server(tmp_path / "server", "--model", str(tmp_path / "model")) as base_url,
        ServiceClient(base_url=base_url) as service,
    ):
        training = service.create_lora_training_client(str(tmp_path / "model"), rank=4, seed=1)
        training.forward_backward([datum(tokens)], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result()
        path = training.save_weights_for_sampler("trained").result().path
        sampler = service.create_sampling_client(model_path=path)
        expected = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()[1:]
        options = ["-o", str(tmp_path / "m.gguf"), "--to", "gguf", "--type", "f32"]
        assert run_cli(["--base-url", base_url, "export", path, *options]) == 0
    file = GgufFile(tmp_path / "m.gguf")
    assert not np.array_equal(file.read("output.weight"), file.read("token_embd.weight"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    logprobs = torch.log_softmax(logits_of(loaded)[:-1], -1)
    got = logprobs.gather(-1, TOKENS[1:, None])[:, 0]
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-4, rtol=0)


def test_q8_0_is_off_by_half_a_step_at_most(tmp_path):
    model = make("llama", tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", number_type="q8_0")
    name = "model.layers.1.mlp.down_proj.weight"
    truth = model.state_dict()[name].numpy()
    file = GgufFile(tmp_path / "m.gguf")
    got = GgufWeights(file, config_from_gguf(file)).read(name).numpy()
    step = np.abs(truth.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    # The scale itself is rounded to float16: 5e-4 of the value beside half a step.
    off = np.abs(got - truth).reshape(-1, 32)
    assert (off <= step * 0.5 + np.abs(truth.reshape(-1, 32)) * 1e-3).all()
    assert off.max() > 0


@pytest.mark.parametrize("word", ["smollm", "gpt-2"])
def test_the_tokenizer_comes_back_as_it_was(word, tmp_path):
    make("llama", tmp_path)
    write_tokenizer(tmp_path, word)
    write_gguf(tmp_path, tmp_path / "m.gguf")
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    back = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))
    text = f"<|im_start|>user\n{TEXT}<|im_end|>"
    assert (
        back.encode(text).ids
        == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    )
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.chat_template"] == "{{x}}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma"}, "the family 'gemma'"),
        ({"attention_bias": True}, "a bias in attention"),
        ({"mlp_bias": True}, "a bias in the MLP"),
        ({"model_type": "mistral", "sliding_window": 64}, "a sliding attention window"),
    ],
)
def test_what_a_file_cannot_say_is_refused_and_leaves_nothing(change, said, tmp_path):
    make("llama", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(NotSupportedError, match=f"does not know {said}.*convert_hf_to_gguf"):
        write_gguf(tmp_path / "model", tmp_path / "m.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path):
    make("llama", tmp_path)
    path = tmp_path / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(rules))
    with pytest.raises(NotSupportedError, match="does not know this tokenizer"):
        write_gguf(tmp_path, tmp_path / "m.gguf")
    path.unlink()
    with pytest.raises(InvalidInputError, match="needs the tokenizer beside the weights"):
        write_gguf(tmp_path, tmp_path / "m.gguf")


def test_values_beyond_float16_are_refused_and_fit_in_float32(tmp_path):
    torch.manual_seed(0)
    make("llama", tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data[0, 0] = 1e6
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="beyond float16. Export with --type f32"):
        write_gguf(tmp_path, tmp_path / "m.gguf")
    assert write_gguf(tmp_path, tmp_path / "m.gguf", number_type="f32").num_tensors == 21

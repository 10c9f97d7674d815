"""A merged model computes what base + adapter computes, tied head or not."""

from __future__ import annotations

import os

import peft
import pytest
import torch
from tiny_llama import tiny_llama
from transformers import LlamaForCausalLM

from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.export.merge import merge_adapter

TOKENS = torch.tensor([[1, 5, 9, 200, 3, 77, 4]])


def make(tmp_path, *, tied, targets, **lora):
    """A tiny base folder, an adapter folder made by peft, and the logits peft computes."""
    base = tiny_llama(tmp_path / "base", vocab_size=256, tie_word_embeddings=tied)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=32, target_modules=targets, **lora)
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with torch.no_grad():
        return adapted(TOKENS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_merged_logits_equal_those_of_base_and_adapter(tmp_path, tied):
    expected = make(tmp_path, tied=tied, targets=["q_proj", "v_proj", "down_proj"])
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert (merged.num_merged, merged.untied) == (6, False)
    with torch.no_grad():
        got = LlamaForCausalLM.from_pretrained(merged.folder)(TOKENS).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_head_adapter_unties_the_head_and_leaves_the_embedding_alone(tmp_path):
    expected = make(tmp_path, tied=True, targets=["q_proj", "lm_head"])
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert merged.untied
    model = LlamaForCausalLM.from_pretrained(merged.folder)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    torch.testing.assert_close(model.model.embed_tokens.weight, base.model.embed_tokens.weight)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


def test_merged_weights_can_be_read_by_those_whom_the_umask_lets(tmp_path):
    """They were for their owner alone, whatever the umask said."""
    make(tmp_path, tied=True, targets=["q_proj"])
    before = os.umask(0o022)
    try:
        merged = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    finally:
        os.umask(before)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in merged.folder.iterdir()}
    assert set(modes.values()) == {"0o644"}, modes


def test_per_module_ranks_and_rslora_scale_as_peft_scales(tmp_path):
    expected = make(
        tmp_path,
        tied=False,
        targets=["q_proj", "v_proj"],
        use_rslora=True,
        rank_pattern={"v_proj": 2},
        alpha_pattern={"v_proj": 8},
    )
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    with torch.no_grad():
        got = LlamaForCausalLM.from_pretrained(merged.folder)(TOKENS).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_what_a_sum_cannot_express_is_refused(tmp_path):
    make(tmp_path, tied=False, targets=["q_proj"], use_dora=True)
    with pytest.raises(NotSupportedError, match="use_dora"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")


def test_an_adapter_of_another_model_is_refused_and_leaves_nothing(tmp_path):
    make(tmp_path, tied=False, targets=["q_proj"])
    tiny_llama(tmp_path / "small", vocab_size=256, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(InvalidInputError):
        merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "small")
    assert not (tmp_path / "out").exists()

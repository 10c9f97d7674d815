"""Tiny models of every family; see `table`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from table import Model, make


@pytest.fixture(scope="session")
def family_model(tmp_path_factory) -> Callable[[str], Model]:
    """`family_model(name)`: made once per session."""
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def mxfp4(tmp_path_factory):
    """(a tiny gpt_oss with its experts in 4 bits, the same with transformers' expansion of them)"""
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = tmp_path_factory.mktemp("mxfp4")
    config = transformers.GptOssConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=5,
        num_experts_per_tok=2, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "packed")
    plain = load_file(folder / "plain" / "model.safetensors")
    stored = dict(plain)
    for layer in range(2):
        for leaf, rows, groups in (("gate_up_proj", 192, 2), ("down_proj", 64, 3)):
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            blocks = torch.randint(0, 256, (5, rows, groups, 16), dtype=torch.uint8)
            scales = torch.randint(117, 124, (5, rows, groups), dtype=torch.uint8)
            expanded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            plain[name] = expanded.contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for kind, tensors in (("plain", plain), ("packed", stored)):
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
    return folder / "packed", folder / "plain"

"""The packed decoder computes what transformers computes."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.engine.device.backend import load_decoder
from tinkex.engine.model.attention import PackedCausal
from tinkex.errors import ConfigError, InvalidInputError, NotSupportedError

LENGTHS = [7, 12, 12, 1, 20]


def packed(decoder, sequences, **options) -> torch.Tensor:
    """Logits of several sequences, computed in one stream."""
    bounds = [0]
    for sequence in sequences:
        bounds.append(bounds[-1] + len(sequence))
    positions_T = torch.cat([torch.arange(len(s)) for s in sequences])
    attend = PackedCausal(bounds, decoder.config.windows)
    hidden_TD = decoder.forward(torch.cat(sequences), positions_T, attend, **options)
    return decoder.head(hidden_TD)


@pytest.mark.parametrize(
    "family",
    [
        "llama-tied-llama3-rope",
        "llama-biased-linear-rope",
        "mistral-window",
        "qwen2-window",
        "qwen3",
    ],
)
def test_logits_of_each_family_match_transformers(tiny, family):
    """R31: ragged sequences in one stream give what each gives alone, to 1e-5."""
    model = tiny(family)
    torch.manual_seed(1)
    sequences = [torch.randint(0, 97, (n,)) for n in LENGTHS]
    with torch.no_grad():
        ours_TV = packed(model.decoder(), sequences)
        truth_TV = torch.cat([model.truth(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(ours_TV, truth_TV.float(), rtol=1e-5, atol=1e-5)


def test_logits_of_the_default_model_match_transformers(default_model_dir):
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    decoder = load_decoder(str(default_model_dir))
    torch.manual_seed(1)
    sequences = [torch.randint(0, 49152, (n,)) for n in (33, 5, 18)]
    with torch.no_grad():
        ours_TV = packed(decoder, sequences)
        peer_TV = torch.cat([peer(s[None]).logits[0] for s in sequences])
    scale = float(peer_TV.abs().max())
    assert float((ours_TV - peer_TV).abs().max()) < 1e-5 * scale


def test_a_sharded_bf16_checkpoint_is_widened_on_a_cpu(tiny, tmp_path):
    """A bf16 product ends the process on some CPUs, without an exception."""
    from transformers import AutoModelForCausalLM

    half = copy.deepcopy(tiny("qwen3").truth).to(torch.bfloat16)
    half.save_pretrained(tmp_path, max_shard_size="20KB")
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    decoder = load_decoder(str(tmp_path))
    assert decoder.dtype == torch.float32
    tokens = torch.arange(20)
    with torch.no_grad():
        truth_TV = truth(tokens[None]).logits[0].float()
        torch.testing.assert_close(packed(decoder, [tokens]), truth_TV, rtol=1e-5, atol=1e-5)


def test_half_precision_is_refused_on_a_cpu(tiny):
    with pytest.raises(ConfigError, match="bf16"):
        load_decoder(str(tiny().folder), dtype=torch.bfloat16)


def test_missing_weights_are_named(tiny, tmp_path):
    shutil.copy(tiny().folder / "config.json", tmp_path)
    with pytest.raises(InvalidInputError, match=r"no model\.safetensors"):
        load_decoder(str(tmp_path))
    weights = load_file(tiny().folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"layers\.1\.mlp\.up_proj"):
        load_decoder(str(tmp_path))


def test_recomputing_layers_changes_no_bit(tiny):
    decoder = tiny("qwen3").decoder()
    tokens = [torch.arange(20)]
    assert torch.equal(packed(decoder, tokens), packed(decoder, tokens, room=0))


def test_unknown_rope_scaling_is_refused_by_name(tiny, tmp_path):
    config = json.loads((tiny().folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotSupportedError, match="longrope"):
        load_decoder(str(tmp_path))

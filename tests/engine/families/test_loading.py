"""Published checkpoints: other layouts are read, bad ones refused by name, towers left on disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_arithmetic import noisy_adapter, packed, sequences_of

from tinkex.engine.device.backend import load_decoder
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch
from tinkex.engine.model.base_model import resolve
from tinkex.engine.model.fingerprint import witness_of
from tinkex.engine.model.loading import weight_bytes
from tinkex.engine.model.weights import SafetensorsWeights, expected_shapes
from tinkex.engine.numerics.mxfp4 import PackedExperts
from tinkex.engine.torch.survey import survey
from tinkex.errors import InvalidInputError, NotSupportedError


def altered(model, folder, change):
    """A copy of a model's folder with its tensors changed by name."""
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder):
    with torch.no_grad():
        return packed(load_decoder(str(folder)), sequences_of([9, 5]))


def unhealthy(folder) -> str:
    return " ".join(r.says for r in survey(resolve(str(folder))) if not r.ok)


def test_a_tower_and_its_prefix_are_left_on_disk(family_model, tmp_path, monkeypatch):
    model = family_model("qwen3_5")

    def with_tower(tensors):
        named = {
            name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()
        }
        return named | {
            "model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 3),
            "mtp.layers.0.fc.weight": torch.ones(2, 2),
        }

    folder = altered(model, tmp_path / "vl", with_tower)
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole))
    read, plain = [], SafetensorsWeights.read
    monkeypatch.setattr(
        SafetensorsWeights, "read", lambda self, name: (read.append(name), plain(self, name))[1]
    )
    torch.testing.assert_close(logits(folder), logits(model.folder))
    assert read
    assert not [name for name in read if "visual" in name or "mtp" in name]
    assert not unhealthy(folder)


def test_fused_experts_and_single_ones_are_the_same_model(family_model, tmp_path):
    def fuse(tensors):
        made = {n: t for n, t in tensors.items() if ".experts." not in n}
        for layer in range(4):
            block = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: [tensors[f"{block}.{e}.{part}_proj.weight"] for e in range(6)]
                for part in ("gate", "up", "down")
            }
            both = zip(parts["gate"], parts["up"], strict=True)
            made[f"{block}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
            made[f"{block}.down_proj"] = torch.stack(parts["down"])
        return made

    model = family_model("qwen3_5_moe")
    folder = altered(model, tmp_path / "fused", fuse)
    assert torch.equal(logits(folder), logits(model.folder))
    assert not unhealthy(folder)


def test_mxfp4_experts_are_expanded_with_a_word_in_the_log(mxfp4, caplog):
    """Against transformers' own expansion."""
    packed_folder, plain = mxfp4
    with caplog.at_level(logging.WARNING):
        ours = logits(packed_folder)
    assert "MXFP4 weights are expanded as they are loaded" in caplog.text
    torch.testing.assert_close(ours, logits(plain))
    assert not unhealthy(packed_folder)


def tensors_of(value) -> int:
    """Bytes of all tensors that an object holds."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(tensors_of, value))
    if dataclasses.is_dataclass(value):
        return sum(tensors_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0


def held(decoder) -> int:
    return tensors_of([decoder.embed_VD, decoder.layers, decoder.final_norm_D, decoder.head_VD])


def test_mxfp4_experts_stay_in_4_bits_where_they_would_not_fit(mxfp4, monkeypatch, caplog):
    """Chosen by the free memory and said in the log; every number is the same to the bit."""
    packed_folder, _ = mxfp4
    config = resolve(str(packed_folder)).config()
    whole, small = (weight_bytes(config, torch.float32, packed=flag) for flag in (False, True))
    assert small < whole / 3
    roomy = load_decoder(str(packed_folder))
    monkeypatch.setattr("tinkex.engine.numerics.ops.free_bytes", lambda: whole)
    with caplog.at_level(logging.WARNING):
        tight = load_decoder(str(packed_folder))
    assert "experts stay in 4 bits" in caplog.text
    assert held(roomy) == whole
    assert held(tight) == small
    assert isinstance(tight.layers[0].mixture.gate_up_EXD, PackedExperts)
    texts, runs = sequences_of([9, 5]), []
    for decoder in (roomy, tight):
        adapter = noisy_adapter(decoder, 1)
        lora = LoraBatch([AdapterSpan(0, 14, adapter)])
        for room in (1e9, 0):
            out = packed(decoder, texts, lora, room=room)
            leaves = list(adapter.parameters())
            grads = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
            runs.append([out.detach(), *grads])
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))
    monkeypatch.setattr("tinkex.engine.numerics.ops.free_bytes", lambda: small - 1)
    with pytest.raises(NotSupportedError, match=r"GB .*even with its experts kept in 4 bits"):
        load_decoder(str(packed_folder))


def test_mxfp4_experts_stay_in_4_bits_where_an_engine_loads_them(mxfp4, monkeypatch):
    """It reads through a witness, whose fingerprint is that of the numbers, kept in any way."""
    source = resolve(str(mxfp4[0]))
    config, roomy, tight = source.config(), witness_of(source), witness_of(source)
    load_decoder(source, weights=roomy)
    whole = weight_bytes(config, torch.float32)
    monkeypatch.setattr("tinkex.engine.numerics.ops.free_bytes", lambda: whole)
    decoder = load_decoder(source, weights=tight)
    assert held(decoder) == weight_bytes(config, torch.float32, packed=True)
    prints = {w.fingerprint(name for name, _ in expected_shapes(config)) for w in (roomy, tight)}
    assert len(prints) == 1


def test_a_doctor_says_both_sizes_of_mxfp4_and_what_this_machine_does(mxfp4, monkeypatch):
    says = {remark.what: remark.says for remark in survey(resolve(str(mxfp4[0])))}
    assert "with its experts kept in 4 bits" in says["memory"]
    if not torch.cuda.is_available():
        assert "the experts are expanded" in says["memory"]
        monkeypatch.setattr("tinkex.engine.numerics.ops.free_bytes", lambda: 10**6)
        says = {remark.what: remark.says for remark in survey(resolve(str(mxfp4[0])))}
        assert "here (cpu, 0.0 GB free) the experts stay in 4 bits" in says["memory"]
    says = {remark.what: remark.says for remark in survey(resolve(str(mxfp4[1])))}
    assert "4 bits" not in says["memory"]


def test_mxfp4_without_its_scales_is_refused_by_name(mxfp4, tmp_path):
    name = "model.layers.1.mlp.experts.down_proj_scales"
    shutil.copytree(mxfp4[0], tmp_path / "lost")
    tensors = load_file(tmp_path / "lost" / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "lost" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=name):
        load_decoder(str(tmp_path / "lost"))
    assert name in unhealthy(tmp_path / "lost")


def test_fp8_blocks_are_expanded(family_model, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"

    def pack(tensors):
        weight = tensors[name]
        scale = torch.full((1, 1), float(weight.abs().max()) / 448)
        packed_weight = (weight / scale).to(torch.float8_e4m3fn)
        return tensors | {name: packed_weight, f"{name}_scale_inv": scale}

    def unpack(tensors):
        weight = pack(tensors)
        return tensors | {
            name: (weight[name].float() * weight[f"{name}_scale_inv"]).bfloat16().float()
        }

    model = family_model("qwen3_moe")
    packed_folder = altered(model, tmp_path / "fp8", pack)
    torch.testing.assert_close(
        logits(packed_folder), logits(altered(model, tmp_path / "plain", unpack))
    )


EXPERT = "model.layers.0.mlp.experts.1.down_proj.weight"


def test_missing_and_misshapen_tensors_are_refused_by_name(family_model, tmp_path):
    model = family_model("qwen3_moe")
    lost = altered(model, tmp_path / "lost", lambda t: {n: v for n, v in t.items() if n != EXPERT})
    with pytest.raises(InvalidInputError, match="experts.1.down_proj"):
        load_decoder(str(lost))
    assert EXPERT in unhealthy(lost)
    norm = "model.layers.1.self_attn.q_norm.weight"
    bent = altered(model, tmp_path / "bent", lambda t: t | {norm: torch.ones(7)})
    with pytest.raises(InvalidInputError, match=r"q_norm.*\(7,\).*\(16,\)"):
        load_decoder(str(bent))
    assert "(7,)" in unhealthy(bent)


def test_an_unknown_layout_of_experts_is_refused_with_what_was_found(family_model, tmp_path):
    def rename(tensors):
        return {name.replace("mlp.experts.", "mlp.expert_list."): t for name, t in tensors.items()}

    folder = altered(family_model("olmoe"), tmp_path / "odd", rename)
    with pytest.raises(NotSupportedError, match="expert_list"):
        load_decoder(str(folder))


def test_a_model_larger_than_the_device_is_refused_with_both_sizes(family_model, monkeypatch):
    monkeypatch.setattr("tinkex.engine.numerics.ops.free_bytes", lambda: 10_000)
    with pytest.raises(NotSupportedError, match=r"GB for its weights in float32; cpu has"):
        load_decoder(str(family_model("mixtral").folder))


def test_a_missing_shard_is_named_before_anything_is_read(family_model, tmp_path):
    model = family_model("mixtral")
    shutil.copytree(model.folder, tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in unhealthy(tmp_path / "m")
    with pytest.raises(InvalidInputError, match="model-00001-of-00002"):
        load_decoder(str(tmp_path / "m"))

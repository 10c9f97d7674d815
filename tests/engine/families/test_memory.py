"""Loading streams: beside what the model keeps, memory holds one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tinkex.engine.lora.adapter import KINDS as ALL_KINDS
from tinkex.engine.lora.adapter import AdapterSpan, Kind, LoraBatch, fresh_adapter
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import Decoder, native_targets
from tinkex.engine.model.families import config_from_hf
from tinkex.engine.model.loading import weight_bytes
from tinkex.engine.model.weights import RandomWeights, expected_shapes
from tinkex.engine.torch.survey import needs

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
}
LOAD = """
import json, sys, threading
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.model.loading import Loader

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

one = Loader.one
def measured(self, *args):
    global peak
    tensor = one(self, *args)
    peak = max(peak, anonymous())
    return tensor
Loader.one = measured
thread = threading.Thread(target=watch)
thread.start()
decoder = load_decoder(sys.argv[1])
done.set()
thread.join()
print(json.dumps({"peak": peak - before, "kept": anonymous() - before}))
"""


def write_shards(folder, config) -> int:
    """A checkpoint in bf16, a shard a layer, its experts one by one; returns its bytes."""
    folder.mkdir()
    files, total = {}, 0
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in expected_shapes(config):
        layer = name.split(".")[2] if ".layers." in name else "rest"
        shard = shards.setdefault(f"model-{layer}.safetensors", {})
        block, _, leaf = name.rpartition(".")
        if len(shape) < 3:
            shard[name] = torch.full(shape, 0.01, dtype=torch.bfloat16)
            continue
        parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        for expert in range(shape[0]):
            for part in parts:
                size = (shape[1] // len(parts), shape[2])
                full = torch.full(size, 0.01, dtype=torch.bfloat16)
                shard[f"{block}.{expert}.{part}.weight"] = full
    for file, tensors in shards.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return total


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_gigabyte_in_shards_is_loaded_without_a_second_copy(tmp_path):
    config = config_from_hf(CONFIG)
    stored = write_shards(tmp_path / "model", config)
    assert 0.9e9 < stored < 1.2e9
    kept = weight_bytes(config, torch.float32)
    largest = max(torch.Size(shape).numel() for _, shape in expected_shapes(config)) * 4
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model")],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["kept"] > 0.95 * kept
    # One stack of experts in bf16 and the same in fp32, and what the allocator rounds up.
    assert measured["peak"] < kept + 2 * largest + (64 << 20), (measured, kept, largest)


SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
KINDS = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("arch", KINDS)
def test_what_a_doctor_says_of_training_is_what_a_pass_keeps(arch):
    """Counted where autograd saves it; a server chooses by the same figure when to recompute."""
    length = 512
    config = config_from_hf(SMALL | KINDS[arch] | {"model_type": arch})
    decoder = Decoder(config, RandomWeights(config))
    kinds: list[Kind] = ["attn", "mlp"]
    adapter = fresh_adapter(
        decoder.targets, rank=4, alpha=8.0, kinds=kinds, seed=1, device=decoder.device
    )
    frozen = [decoder.embed_VD, decoder.final_norm_D, *adapter.parameters(), *held(decoder.layers)]
    known = {tensor.untyped_storage().data_ptr() for tensor in frozen}
    saved: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.arange(length) % 512
    attend = PackedCausal([0, length], config.windows)
    lora = LoraBatch([AdapterSpan(0, length, adapter)])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = decoder.forward(tokens, torch.arange(length), attend, lora)
    assert hidden.requires_grad
    said = needs(config, torch.float32, length=length, rank=4).training
    assert 0.7 < sum(saved.values()) / said < 1.6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", KINDS)
def test_what_a_doctor_says_of_an_adapter_is_what_it_holds(arch, tied):
    """It sits on the head too, where that has no weights of its own."""
    ties = {"model_type": arch, "tie_word_embeddings": tied}
    config = config_from_hf(SMALL | KINDS[arch] | ties)
    adapter = fresh_adapter(
        native_targets(config), rank=4, alpha=8.0, kinds=ALL_KINDS, seed=1, device="cpu"
    )
    num_numbers = sum(tensor.numel() for tensor in adapter.parameters())
    said = needs(config, torch.float32, length=1, rank=4).adapter
    assert said == 16 * num_numbers  # weights, gradients and two moments


def held(value):
    """Every tensor in a layer."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from held(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from held(getattr(value, field.name))

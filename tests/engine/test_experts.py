"""Mixture-of-experts models: every expert carries an adapter, or `train_mlp` is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.func import functional_call
from training import save

from tinkex.engine.checkpoint.reader import read
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.jobs import CreateAdapterJob, LoraSpec
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch, fresh_adapter
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import InvalidInputError

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=24, head_dim=16, norm_topk_prob=True
    ),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4, intermediate_size=24),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
}


def saved(config, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def created(**lora):
    return CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=LoraSpec(**lora))


def noisy_adapter(decoder, seed):
    adapter = fresh_adapter(
        decoder.targets, rank=3, alpha=6.0, kinds=["attn", "mlp"], seed=seed, device="cpu"
    )
    generator = torch.Generator().manual_seed(seed)
    for _, _, b_Or in adapter.modules():
        b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.3)
    return adapter


def merged(model, adapter):
    """The model's parameters with the adapter added, as a function of the adapter's tensors."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    fused = {name: p.clone() for name, p in parameters.items() if ".experts." in name}
    size = {name: p.shape[1] // 2 for name, p in fused.items() if "gate_up" in name}
    pieces = {name: [w.clone() for w in p] for name, p in fused.items()}
    for part, a_rI, b_Or in adapter.modules():
        name, delta = part.target.module, part.scale * b_Or @ a_rI
        block, _, rest = name.partition(".experts.")
        if not rest:
            parameters[f"{name}.weight"] = parameters[f"{name}.weight"] + delta
            continue
        expert, leaf = rest.split(".")
        whole = f"{block}.experts.{'down_proj' if leaf == 'down_proj' else 'gate_up_proj'}"
        empty = torch.zeros_like(delta)
        if leaf == "gate_proj":
            delta = torch.cat([delta, empty])
        elif leaf == "up_proj":
            delta = torch.cat([empty, delta])
        assert leaf == "down_proj" or len(delta) == 2 * size[whole]
        pieces[whole][int(expert)] = pieces[whole][int(expert)] + delta
    return parameters | {name: torch.stack(experts) for name, experts in pieces.items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_with_adapters_match_merged_weights_and_their_gradient(family, recompute, tmp_path):
    model = saved(FAMILIES[family], tmp_path)
    decoder = load_decoder(str(tmp_path))
    adapters = [noisy_adapter(decoder, seed) for seed in range(2)]
    texts = [torch.arange(7), torch.arange(30, 41)]
    stream, positions = torch.cat(texts), torch.cat([torch.arange(len(t)) for t in texts])
    lora = LoraBatch([AdapterSpan(0, 7, adapters[0]), AdapterSpan(7, 18, adapters[1])])
    hidden = decoder.forward(
        stream, positions, PackedCausal([0, 7, 18]), lora, room=0 if recompute else 1e9
    )
    logits = decoder.head(hidden, lora)
    slope = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    leaves = [p for a in adapters for p in a.parameters()]
    ours = torch.autograd.grad(logits, leaves, slope, materialize_grads=True)
    expected, grads = [], []
    for text, adapter, part in zip(texts, adapters, slope.split([7, 11]), strict=True):
        call = functional_call(model, merged(model, adapter), (text[None],), {"use_cache": False})
        expected.append(call.logits[0])
        own = list(adapter.parameters())
        grads += torch.autograd.grad(call.logits[0], own, part, materialize_grads=True)
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-5)
    for mine, reference in zip(ours, grads, strict=True):
        assert (mine - reference).norm() <= 1e-5 * max(1.0, float(reference.norm()))


def test_an_expert_s_adapter_is_saved_under_the_name_it_has_as_a_linear(tmp_path):
    saved(FAMILIES["qwen3_moe"], tmp_path / "model")
    decoder = load_decoder(str(tmp_path / "model"))
    trainer = Trainer(decoder, base_model="m")
    trainer.create(created(rank=2, seed=1))
    save(trainer, tmp_path / "adapter")
    from safetensors.torch import load_file

    names = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers.1.mlp.experts.3."
    assert {n.removeprefix(prefix) for n in names if n.startswith(prefix)} == {
        f"{leaf}_proj.lora_{side}.weight" for leaf in ("gate", "up", "down") for side in "AB"
    }
    again = read(
        str(tmp_path / "adapter"), decoder.targets, decoder.device, with_optimizer=False
    ).adapter
    assert torch.equal(again.flat, trainer.adapters["a"].adapter.flat)


def test_a_tensor_of_more_experts_than_there_are_is_not_taken_apart(tmp_path):
    """A side that all experts share makes a few bytes say that there are millions of them."""
    saved(FAMILIES["qwen3_moe"], tmp_path)
    decoder = load_decoder(str(tmp_path))
    trainer = Trainer(decoder, base_model="m")
    trainer.create(created(rank=1, seed=1))
    folder = tmp_path / "adapter"
    save(trainer, folder)
    name = "base_model.model.model.layers.1.mlp.experts.w1"
    sides = {"A": torch.zeros(1000, 1, 32), "B": torch.zeros(1, 24, 1)}
    tensors = {f"{name}.lora_{side}.weight": tensor for side, tensor in sides.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(InvalidInputError) as refused:
        read(str(folder), decoder.targets, decoder.device, with_optimizer=False)
    assert str(refused.value) == (
        "the model has no adaptable module 'model.layers.1.mlp.experts.4.gate_proj'"
    )


def test_routing_carries_no_adapter(tmp_path):
    saved(FAMILIES["qwen2_moe"], tmp_path)
    decoder = load_decoder(str(tmp_path))
    modules = [part.module for t in decoder.targets.values() for part in t.parts]
    assert not [name for name in modules if name.endswith((".gate", "shared_expert_gate"))]
    assert not decoder.uncovered


def test_experts_that_cannot_carry_adapters_refuse_train_mlp_and_name_the_fix(
    tmp_path, monkeypatch
):
    saved(FAMILIES["qwen2_moe"], tmp_path)
    monkeypatch.setattr("tinkex.engine.model.foreign.is_experts", lambda module: False)
    trainer = Trainer(load_decoder(str(tmp_path)), base_model="m")
    with pytest.raises(InvalidInputError, match="train_mlp=False") as caught:
        trainer.create(created(rank=2))
    assert "experts.gate_up_proj" in str(caught.value)
    assert not trainer.adapters
    trainer.create(created(rank=2, train_mlp=False))
    assert "a" in trainer.adapters

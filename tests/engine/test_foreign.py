"""Models outside our families run through transformers, behind our interface, or are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from training import save

from tinkex.engine.device.backend import load_decoder
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoraSpec,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.foreign import ForeignDecoder
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import NotSupportedError

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
FOREIGN = {
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    ),
    "phi3": transformers.Phi3Config(**SMALL, pad_token_id=0),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "gemma3-windows": transformers.Gemma3TextConfig(
        **SMALL,
        head_dim=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "granite-scaled": transformers.GraniteConfig(
        **SMALL,
        logits_scaling=4.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "cohere-scaled": transformers.CohereConfig(**SMALL, logit_scale=0.25, pad_token_id=0),
}


def save_model(config, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", FOREIGN)
def test_logits_and_gradients_match_peft(name, tmp_path, rng):
    """R31: packed sequences of a foreign model train as peft trains them, one by one."""
    from peft import PeftModel

    model = save_model(FOREIGN[name], tmp_path / "base")
    decoder = load_decoder(str(tmp_path / "base"))
    assert isinstance(decoder, ForeignDecoder)
    trainer = Trainer(decoder, base_model=name)
    spec = LoraSpec(rank=3, seed=0, train_unembed=False)
    trainer.create(CreateAdapterJob(job_id="", adapter_id="a", base_model=name, lora=spec))
    resident = trainer.adapters["a"]
    with torch.no_grad():
        for _, _, b_Or in resident.adapter.modules():
            b_Or.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    folder = str(tmp_path / "ck")
    save(trainer, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *a, **k: None)  # Conv1D: fan_in_fan_out is set
        peer = PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
    data, loss = [], torch.zeros(())
    for length in (9, 14, 3):
        tokens, targets = rng.integers(0, 97, length), rng.integers(0, 97, length)
        weights = rng.normal(size=length).astype(np.float32)
        data.append(
            TrainDatum(tokens=tokens, inputs={"target_tokens": targets, "weights": weights})
        )
        logits_TV = peer(torch.as_tensor(tokens)[None]).logits[0]
        logp = logits_TV.log_softmax(-1).gather(1, torch.as_tensor(targets)[:, None])[:, 0]
        loss = loss - (logp * torch.as_tensor(weights)).sum()
    loss.backward()
    job = TrainJob(job_id="", adapter_id="a", data=tuple(data), loss_fn="cross_entropy")
    (result,) = trainer.train([job])
    np.testing.assert_allclose(
        result.outputs[-1]["logprobs"], logp.detach().numpy(), rtol=1e-4, atol=1e-5
    )
    theirs = dict(peer.named_parameters())
    views, at = resident.adapter.views(resident.grad), 0
    for group in resident.adapter.groups.values():
        prefix = f"base_model.model.{group.parts[0].target.module}"
        for view, side in zip(views[at : at + 2], "AB", strict=True):
            expected = theirs[f"{prefix}.lora_{side}.default.weight"].grad
            torch.testing.assert_close(view, expected, rtol=1e-4, atol=1e-4)
        at += 2


@pytest.mark.parametrize("name", FOREIGN)
def test_recomputed_layers_keep_little_and_give_the_same_gradient(name, tmp_path, rng):
    save_model(FOREIGN[name], tmp_path / "base")
    tokens, targets = rng.integers(0, 97, 40), rng.integers(0, 97, 40)
    inputs = {"target_tokens": targets, "weights": np.ones(40, np.float32)}
    job = TrainJob(
        job_id="",
        adapter_id="a",
        data=(TrainDatum(tokens=tokens, inputs=inputs),),
        loss_fn="cross_entropy",
    )
    grads, kept_bytes = [], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept_bytes[-1] += tensor.numel() * tensor.element_size()
        return tensor

    for activation_bytes in (1 << 30, 1):
        config = TrainerConfig(activation_bytes=activation_bytes)
        trainer = Trainer(load_decoder(str(tmp_path / "base")), base_model=name, config=config)
        spec = LoraSpec(rank=3, seed=0)
        trainer.create(CreateAdapterJob(job_id="", adapter_id="a", base_model=name, lora=spec))
        kept_bytes.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            (result,) = trainer.train([job])
        assert isinstance(result, TrainResult)
        grads.append(trainer.adapters["a"].grad)
    assert torch.equal(*grads)
    assert kept_bytes[1] < kept_bytes[0] / 4


def test_capped_attention_is_refused_by_name(tmp_path):
    config = transformers.Gemma2Config(**SMALL, head_dim=16, attn_logit_softcapping=5.0)
    save_model(config, tmp_path)
    with pytest.raises(NotSupportedError, match="softcap"):
        load_decoder(str(tmp_path))


def test_arithmetic_behind_the_head_is_found_by_the_probe(tmp_path):
    """Capped logits: scoring without the cap would be silently different."""
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=16, final_logit_softcapping=0.5)
    save_model(config, tmp_path)
    with pytest.raises(NotSupportedError, match="part we do not compute"):
        load_decoder(str(tmp_path))


def test_layers_without_attention_are_refused(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    save_model(config, tmp_path)
    with pytest.raises(NotSupportedError, match="'mamba'"):
        load_decoder(str(tmp_path))


def test_packed_sequences_do_not_see_each_other(tmp_path):
    save_model(FOREIGN["olmo2"], tmp_path)
    decoder = load_decoder(str(tmp_path))
    one, two = torch.arange(6), torch.arange(20, 29)
    with torch.no_grad():
        both = decoder.forward(
            torch.cat([one, two]),
            torch.cat([torch.arange(6), torch.arange(9)]),
            PackedCausal([0, 6, 15]),
        )
        alone = decoder.forward(two, torch.arange(9), PackedCausal([0, 9]))
    torch.testing.assert_close(both[6:], alone, rtol=1e-5, atol=1e-5)

"""Small models of every family on a GPU, and samples of them: what the CUDA tests share."""

from __future__ import annotations

import torch

from tinkex.engine.device.backend import decoder_class, ops_for
from tinkex.engine.lora.adapter import fresh_adapter
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.families import config_from_hf
from tinkex.engine.model.shape import ModelConfig, RopeConfig
from tinkex.engine.model.weights import RandomWeights


def config(**changes) -> ModelConfig:
    values = {
        "arch": "qwen3",
        "vocab_size": 512,
        "hidden_size": 256,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "mlp_size": 384,
        "norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e6),
        "max_context_length": 1024,
        "qk_norm": True,
    }
    return ModelConfig(**(values | changes))


FAMILIES = {
    "qwen3": config(),
    "llama": config(arch="llama", qk_norm=False, tied_head=True, num_kv_heads=8),
    "qwen2": config(arch="qwen2", qk_norm=False, qkv_bias=True),
    "windowed": config(arch="mistral", qk_norm=False, windows=(None, 32, 32)),
}


_SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
}
_SIXTEEN = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
OTHERS = {
    "qwen3_moe": {"num_hidden_layers": 3, "head_dim": 64, **_SIXTEEN, "norm_topk_prob": True},
    "mixtral": {"num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2,
                "sliding_window": 40},
    "olmoe": {"num_hidden_layers": 3, "num_key_value_heads": 8, "num_experts": 16,
              "num_experts_per_tok": 4, "clip_qkv": 1.5},
    "gpt_oss": {"num_hidden_layers": 4, "head_dim": 64, "num_local_experts": 8,
                "num_experts_per_tok": 4, "sliding_window": 32},
    "qwen3_5_text": _HYBRID,
    "qwen3_next": {**_HYBRID, **_SIXTEEN, "shared_expert_intermediate_size": 128},
    "qwen3_5_moe_text": {**_HYBRID, **_SIXTEEN, "shared_expert_intermediate_size": 128},
}  # fmt: skip
"""Families with other parts: see `cuda.families`."""


def other(family: str) -> ModelConfig:
    return config_from_hf({"model_type": family, **_SMALL, **OTHERS[family]})


def kind_of(cfg: ModelConfig) -> type[Decoder]:
    return decoder_class(cfg, "cuda")


class LoudWeights(RandomWeights):
    """Random weights whose layers do not vanish beside the residual; the same in every read."""

    def read(self, name):
        self._generator.manual_seed(sum(name.encode()))
        tensor = super().read(name)
        return tensor * (4 if tensor.ndim > 1 else 1)


def generate(
    kind,
    dtype,
    prompts,
    *,
    adapters=(),
    max_tokens=24,
    look_ahead=True,
    stops=(),
    kv_bytes=64 << 20,
    pass_tokens=64,
    **options,
):
    from tinkex.engine import jobs
    from tinkex.engine.sample.config import SamplerConfig
    from tinkex.engine.sample.sampler import Sampler

    cfg = FAMILIES["qwen3"]
    decoder = kind(cfg, RandomWeights(cfg, seed=1, device="cuda"), ops=ops_for("cuda"), dtype=dtype)
    sampler = Sampler(decoder, SamplerConfig(kv_bytes=kv_bytes, max_pass_tokens=pass_tokens))
    makers = adapters or [None] * len(prompts)
    known = {make: make(decoder) for make in makers if make}
    ends = {}
    for number, (prompt, make) in enumerate(zip(prompts, makers, strict=True)):
        lora = known.get(make)
        job = jobs.SampleJob(
            job_id=str(number),
            base_model="m",
            adapter_folder=f"f{id(lora)}" if lora else None,
            prompt=prompt,
            max_tokens=max_tokens,
            stop_tokens=stops,
            **options,
        )
        sampler.add(job, lora, lambda event: ends.update({event.job_id: event}))
    while sampler.has_work:
        sampler.step(look_ahead=look_ahead)
    return [ends[str(number)].result.sequences[0] for number in range(len(prompts))]


def noisy_adapter(rank, seed):
    def make(decoder):
        adapter = fresh_adapter(
            decoder.targets,
            rank=rank,
            alpha=16.0,
            kinds=["attn", "mlp", "unembed"],
            seed=seed,
            device="cuda",
        )
        generator = torch.Generator().manual_seed(seed)
        for _, _, b_Or in adapter.modules():
            b_Or.data.copy_(torch.randn(b_Or.shape, generator=generator) * 0.02)
        return adapter.frozen_copy()

    return make

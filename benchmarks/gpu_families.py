"""Mixtures, hybrids, gpt-oss and long contexts on one GPU: ours against transformers.

    python benchmarks/gpu.py --only moe,hybrid,oss,long,whole [--no-bar] [--write]
    python benchmarks/gpu_families.py check

Slices of published shapes with random weights in bf16: 12 of 48 layers of Qwen3-30B-A3B, 8 of 32 of
Qwen3.5-9B, 6 of 24 of gpt-oss-20b, the whole of Qwen3-4B at long lengths, and the whole of
Qwen3-30B-A3B. The peer is
transformers with its fastest experts (`grouped_mm`) and adapters of its own on attention. `check`
compares every family's kernels with the plain decoder in fp32, on the card.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import report
from gpu import GIB, free, seconds

from tinkex.contract.optimizers import AdamParams
from tinkex.engine import jobs
from tinkex.engine.device.backend import decoder_class, ops_for
from tinkex.engine.lora.adapter import AdapterSpan, LoraBatch, fresh_adapter
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.families import config_from_hf
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import RandomWeights
from tinkex.engine.numerics.mxfp4 import PackedExperts
from tinkex.engine.numerics.routed_experts import unpack
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.trainer import Trainer

RANK = 32
MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
}
OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "tie_word_embeddings": False,
}
LONG = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "tie_word_embeddings": True,
}
EVEN = [2048] * 8


def decoder_of(config: ModelConfig, **options: Any) -> Any:
    kind = decoder_class(config, "cuda")
    return kind(config, RandomWeights(config, device="cuda"), ops=ops_for("cuda"), **options)


# ------------------------------------------------------------------------------------ training


def datums(config: ModelConfig, lengths: Sequence[int]) -> tuple[jobs.TrainDatum, ...]:
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        tokens = rng.integers(0, config.vocab_size, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        made.append(jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs))
    return tuple(made)


def our_step(trainer: Trainer, data: tuple[jobs.TrainDatum, ...]) -> Any:
    job = jobs.TrainJob(job_id="", adapter_id="a", data=data, loss_fn="cross_entropy")
    (result,) = trainer.train([job])
    if isinstance(result, Exception):
        raise result
    params = AdamParams(learning_rate=1e-5)
    trainer.optim(jobs.OptimJob(job_id="", adapter_id="a", params=params))
    return result


def train_rate(
    decoder: Any, lengths: Sequence[int], *, mlp: bool, rank: int = RANK, repeats: int = 3
) -> float:
    trainer = Trainer(decoder, base_model="m")
    lora = jobs.LoraSpec(rank=rank, seed=0, train_mlp=mlp, train_unembed=False)
    trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="a", base_model="m", lora=lora))
    data = datums(decoder.config, lengths)
    return sum(lengths) / seconds(lambda: our_step(trainer, data), repeats)


# ------------------------------------------------------------------------------------ sampling


def decode_rate(decoder: Any, batch: int = 128, prompt: int = 512, new: int = 64) -> float:
    """Tokens per second of decode steps alone."""
    sampler = Sampler(decoder, SamplerConfig(kv_bytes=40 * GIB, max_pass_tokens=8192))
    _decode(sampler, batch, prompt, 16)  # records the graphs
    return _decode(sampler, batch, prompt, new)


def _decode(sampler: Sampler, batch: int, prompt: int, new: int) -> float:
    rng, ends = np.random.default_rng(time.monotonic_ns()), []
    for number in range(batch):
        job = jobs.SampleJob(
            job_id=f"{number}-{time.monotonic_ns()}",
            base_model="m",
            adapter_folder=None,
            prompt=rng.integers(0, sampler.decoder.config.vocab_size, prompt),
            max_tokens=new,
            stop_tokens=(),
        )
        sampler.add(job, None, ends.append)
    began = ended = 0.0
    steps = 0
    while sampler.has_work:
        if sampler.step() == batch:
            if steps == 0:
                torch.cuda.synchronize()
                began = time.perf_counter()
            ended, steps = time.perf_counter(), steps + 1
    assert all(isinstance(end, jobs.Done) for end in ends), ends[0]
    return batch * (steps - 1) / max(ended - began, 1e-9)


def profile(raw: dict[str, Any]) -> None:
    """Where a decode step and a training step spend the card's time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    decoder = decoder_of(config_from_hf(raw))
    sampler = Sampler(decoder, SamplerConfig(kv_bytes=40 * GIB, max_pass_tokens=8192))
    _decode(sampler, 128, 64, 12)
    with record(activities=[ProfilerActivity.CUDA]) as decoding:
        print("decode", _decode(sampler, 128, 64, 12))
    print(decoding.key_averages().table(sort_by="cuda_time_total", row_limit=16)[:5200])
    del sampler
    free()
    train_rate(decoder, EVEN, mlp=False, repeats=1)
    with record(activities=[ProfilerActivity.CUDA]) as training:
        print("train", train_rate(decoder, EVEN, mlp=False, repeats=1))
    print(training.key_averages().table(sort_by="cuda_time_total", row_limit=22)[:6000])


# ------------------------------------------------------------------------------------ the peer


def peer_model(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**raw)
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if "num_experts_per_tok" in raw:
        options["experts_implementation"] = "grouped_mm"
    if raw["model_type"] == "gpt_oss":
        options["attn_implementation"] = "eager"
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, **options)
    return model.to(torch.bfloat16)


def peer_train_rate(model: Any, lengths: Sequence[int]) -> float:
    """Adapters on attention's linears, as a plain module in front of each: no peft needed."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
    model.requires_grad_(False)
    parameters = []
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in names and isinstance(module, torch.nn.Linear):
            parameters += _adapt(module)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    tokens = torch.randint(0, model.config.vocab_size, (len(lengths), lengths[0]), device="cuda")
    targets = tokens.roll(-1, 1)

    def step() -> None:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = sum(
            torch.nn.functional.cross_entropy(model.lm_head(h).float(), t, reduction="sum")
            for h, t in zip(hidden, targets, strict=True)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return sum(lengths) / seconds(step, 2)


def _adapt(module: torch.nn.Linear) -> list[torch.nn.Parameter]:
    device = module.weight.device
    a = torch.nn.Parameter(torch.randn(RANK, module.in_features, device=device).bfloat16() * 0.01)
    b = torch.nn.Parameter(torch.zeros(module.out_features, RANK, device=device).bfloat16())
    plain = module.forward
    module.forward = lambda x: plain(x) + (x @ a.t()) @ b.t()  # type: ignore[method-assign]
    return [a, b]


@torch.inference_mode()
def peer_decode_rate(model: Any, batch: int = 128, prompt: int = 512) -> float:
    prompts = torch.randint(0, model.config.vocab_size, (batch, prompt), device="cuda")
    mask = torch.ones_like(prompts)

    def generate(new: int) -> float:
        options = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        began = time.perf_counter()
        model.generate(prompts, attention_mask=mask, do_sample=True, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    generate(2)
    short, long = generate(4), generate(20)
    return batch * 16 / (long - short)


# ------------------------------------------------------------------------------------- figures


def figures(only: Sequence[str], *, peers: bool = True) -> list[report.Figure]:
    made: list[report.Figure] = []

    def add(name: str, ours: float, peer: float | None, bar: float | None, note: str = "") -> None:
        made.append(
            report.Figure(name=name, ours=ours, peer=peer, unit="tokens/s", bar=bar, note=note)
        )
        print(made[-1], flush=True)

    for name, raw in (("moe", MOE), ("hybrid", HYBRID), ("oss", OSS)):
        if name not in only:
            continue
        peer_train = peer_decode = None
        if peers:
            model = peer_model(raw)
            peer_decode = peer_decode_rate(model)
            peer_train = peer_train_rate(model, EVEN)
            del model
            free()
        decoder = decoder_of(config_from_hf(raw))
        bars = {"moe": (90e3, 17e3), "hybrid": (40e3, 30e3), "oss": (None, 8e3)}[name]
        train = train_rate(decoder, EVEN, mlp=False)
        add(f"gpu_{name}_train", train, peer_train, {"moe": 2.0, "oss": 1.3}.get(name))
        if bars[0] is not None:
            add(f"gpu_{name}_train_floor", train, None, bars[0])
        if name == "moe":
            every = train_rate(decoder, EVEN, mlp=True)
            add("gpu_moe_train_every_expert", every, None, 60e3)
        free()
        decode = decode_rate(decoder)
        add(f"gpu_{name}_decode", decode, peer_decode, None)
        add(f"gpu_{name}_decode_floor", decode, None, bars[1])
        del decoder
        free()
    if "long" in only:
        decoder = decoder_of(config_from_hf(LONG))
        for length, bar in ((16384, 15.6e3), (65536, 5.2e3), (131072, None)):
            rate = train_rate(decoder, [length], mlp=True, rank=16, repeats=1)
            peak = torch.cuda.max_memory_allocated() / GIB
            add(f"gpu_long_train_{length}", rate, None, bar, f"peak {peak:.0f} GiB")
            free()
        del decoder
        free()
    if "long_decode" in only:
        decoder = decoder_of(config_from_hf(LONG))
        rate = decode_rate(decoder, batch=1, prompt=130_000, new=64)
        add("gpu_long_decode_130000", rate, None, None, "one sample")
        del decoder
        free()
    if "whole" in only:
        decoder = decoder_of(config_from_hf({**MOE, "num_hidden_layers": 48}))
        train = train_rate(decoder, EVEN, mlp=False)
        add("gpu_moe_whole_train", train, None, 22e3)
        free()
        add("gpu_moe_whole_decode", decode_rate(decoder), None, 4.5e3)
        del decoder
        free()
    return made


# --------------------------------------------------------------------------------------- check


def small(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4}
    if raw["model_type"] == "gpt_oss":
        sizes |= {"intermediate_size": 256, "num_hidden_layers": 4}
    return replace(config_from_hf({**raw, **sizes, **changes}), max_context_length=4096)


class _Louder:
    """Random weights whose layers do not vanish beside the residual."""

    def __init__(self, config: ModelConfig) -> None:
        self._inner = RandomWeights(config, device="cuda")

    def names(self) -> Any:
        return self._inner.names()

    def read(self, name: str) -> torch.Tensor:
        tensor = self._inner.read(name)
        return tensor * (4 if tensor.ndim > 1 else 1)


class _Kept:
    """The same tensors for every decoder."""

    def __init__(self, reader: Any) -> None:
        self._tensors = {name: reader.read(name) for name in reader.names()}

    def names(self) -> Any:
        return iter(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


def check() -> None:
    shapes = {
        "qwen3_moe": small(MOE, num_attention_heads=8, num_experts=16),
        "qwen3_5": small(HYBRID, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=512, linear_num_key_heads=2, linear_num_value_heads=4),
        "gpt_oss": small(OSS, num_attention_heads=8, num_key_value_heads=2, num_local_experts=8),
        "qwen3_next": small(HYBRID, model_type="qwen3_next", num_attention_heads=4,
                            num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
                            num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128,
                            shared_expert_intermediate_size=128),
    }  # fmt: skip
    for name, config in shapes.items():
        weights = _Kept(_Louder(config))
        try:
            _check_one(name, config, weights)
            if name == "gpt_oss":
                _check_packed(name, config, weights)
        except Exception as exc:
            import traceback

            traceback.print_exc()
            print(f"check {name}: FAILED {exc!r}", flush=True)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def _check_one(name: str, config: ModelConfig, weights: Any) -> None:
    exact = Decoder(config, weights, ops=ops_for("cuda"), dtype=torch.float32)
    plain = Decoder(config, weights, ops=ops_for("cuda"))
    ours = decoder_class(config, "cuda")(config, weights, ops=ops_for("cuda"))
    lengths = [300, 41, 128, 128]
    bounds = [0, *np.cumsum(lengths).tolist()]
    tokens = torch.randint(0, config.vocab_size, (bounds[-1],), device="cuda")
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    adapter = fresh_adapter(
        exact.targets, rank=16, alpha=16.0, kinds=["attn", "mlp"], seed=0, device="cuda"
    )
    adapter.flat.normal_(0, 0.05, generator=torch.Generator("cuda").manual_seed(0))
    lora = LoraBatch([AdapterSpan(0, bounds[-1], adapter)])
    slope = torch.randn(bounds[-1], config.hidden_size, device="cuda") * 0.01
    answers = []
    for decoder in (exact, plain, ours):
        adapter.drop_grad()
        adapter.start_grad()
        hidden = decoder.forward(tokens, positions, PackedCausal(bounds, config.windows), lora)
        hidden.backward(slope.to(hidden.dtype))
        assert adapter.grad is not None
        answers.append((hidden.detach(), adapter.grad.clone()))
    (h, g), (h1, g1), (h2, g2) = answers
    print(
        f"check {name}: hidden ours {_distance(h2, h):.2e} plain bf16 {_distance(h1, h):.2e}; "
        f"gradient ours {_distance(g2, g):.2e} plain bf16 {_distance(g1, g):.2e}",
        flush=True,
    )
    _check_gap(name, config, ours, adapter.frozen_copy())


def _check_gap(name: str, config: ModelConfig, decoder: Any, adapter: Any) -> None:
    """Sampled logprobs against the trainer's, with and without recorded steps."""
    sampler = Sampler(decoder, SamplerConfig(kv_bytes=GIB, max_pass_tokens=256))
    ends: list[Any] = []
    for number in range(6):
        job = jobs.SampleJob(
            job_id=str(number), base_model="m", adapter_folder=None, stop_tokens=(), seed=number,
            prompt=np.random.default_rng(number % 3).integers(0, config.vocab_size, 70),
            max_tokens=40, num_samples=2, routed_experts=config.routing is not None,
        )  # fmt: skip
        sampler.add(job, adapter if number % 2 else None, ends.append, version=str(number % 2))
    while sampler.has_work:
        sampler.step()
    gaps, replayed, changed = [], [], []
    for end in ends:
        number = int(end.job_id)
        prompt = np.random.default_rng(number % 3).integers(0, config.vocab_size, 70)
        for sequence in end.result.sequences:
            tokens = torch.as_tensor(np.concatenate([prompt, sequence.tokens])).cuda()
            lora = LoraBatch([AdapterSpan(0, len(tokens), adapter)]) if number % 2 else None
            routing = Routing()
            gaps.append(_gap(decoder, tokens, lora, sequence, routing))
            if (experts := config.routing) is None:
                continue
            words = np.concatenate([end.result.prompt_routed_experts, sequence.routed_experts])
            rows = torch.from_numpy(unpack(words, experts, len(words), "").copy()).cuda()
            given = {layer: rows[:, i] for i, layer in enumerate(config.expert_layers)}
            replayed.append(_gap(decoder, tokens, lora, sequence, Routing(given)))
            free_choice = torch.stack([routing.chosen[i] for i in config.expert_layers], 1)
            differs = free_choice[:-1].sort().values != rows[:-1].sort().values
            changed.append(differs.any(-1).float().mean().item())
    gap = np.concatenate(gaps)
    print(f"check {name}: sampler gap mean {gap.mean():.2e} max {gap.max():.2e}", flush=True)
    if replayed:
        gap = np.concatenate(replayed)
        print(
            f"check {name}: with router replay mean {gap.mean():.2e} max {gap.max():.2e}; "
            f"{100 * float(np.mean(changed)):.2f} % of routings differ from a free pass",
            flush=True,
        )


def _gap(decoder: Any, tokens: Any, lora: Any, sequence: Any, routing: Routing) -> Any:
    """|trainer - sampler| of the sampled tokens."""
    attend = PackedCausal([0, len(tokens)], decoder.config.windows)
    with torch.no_grad():
        positions = torch.arange(len(tokens)).cuda()
        hidden = decoder.forward(tokens, positions, attend, lora, routing=routing)
        logp = decoder.head(hidden, lora).log_softmax(-1)
    truth = logp[69:-1].gather(1, tokens[70:, None])[:, 0].cpu().numpy()
    return np.abs(truth - sequence.logprobs)


def _check_packed(name: str, config: ModelConfig, weights: Any) -> None:
    """Experts kept in 4 bits against the same expanded: equal to the bit, sampled and trained."""
    generator = torch.Generator("cuda").manual_seed(0)
    kept, whole = (
        decoder_class(config, "cuda")(config, weights, ops=ops_for("cuda")) for _ in "12"
    )
    for one, other in zip(kept.layers, whole.layers, strict=True):
        stacks = {}
        for leaf in ("gate_up_EXD", "down_EDM"):
            *rows, columns = getattr(one.mixture, leaf).shape
            blocks = torch.randint(
                0, 256, (*rows, columns // 32, 16), generator=generator, device="cuda"
            )
            scales = torch.randint(
                118, 123, (*rows, columns // 32), generator=generator, device="cuda"
            )
            stacks[leaf] = PackedExperts(blocks.byte(), scales.byte(), kept.dtype)
        one.mixture = replace(one.mixture, **stacks)
        expanded = {leaf: stack.expanded() for leaf, stack in stacks.items()}
        other.mixture = replace(other.mixture, **expanded)
    adapter = fresh_adapter(
        kept.targets, rank=16, alpha=16.0, kinds=["attn", "mlp"], seed=0, device="cuda"
    )
    tokens = torch.randint(0, config.vocab_size, (200,), generator=generator, device="cuda")
    answers = []
    for decoder in (kept, whole):
        adapter.drop_grad()
        adapter.start_grad()
        attend = PackedCausal([0, 200], config.windows)
        lora = LoraBatch([AdapterSpan(0, 200, adapter)])
        hidden = decoder.forward(tokens, torch.arange(200).cuda(), attend, lora)
        hidden.sum().backward()
        assert adapter.grad is not None
        answers.append((hidden.detach(), adapter.grad.clone()))
    same = [torch.equal(*pair) for pair in zip(*answers, strict=True)]
    print(f"check {name}: experts in 4 bits, hidden and gradient equal to the bit: {same}")
    _check_gap(f"{name} in 4 bits", config, kept, adapter.frozen_copy())


def _tried(label: str, action: Callable[[], object]) -> None:
    began = time.perf_counter()
    try:
        action()
    except Exception as exc:
        import traceback

        traceback.print_exc()
        print(f"{label}: FAILED {exc!r}", flush=True)
    free()
    print(f"{label}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    if "check" in words:
        _tried("check", check)
    for word in words:
        if word.startswith("profile-"):
            raw = {"moe": MOE, "hybrid": HYBRID, "oss": OSS}[word.removeprefix("profile-")]
            _tried(word, lambda raw=raw: profile(raw))
        if word in ("moe", "hybrid", "oss", "long", "whole"):
            _tried(word, lambda word=word: figures([word], peers="peers" in words))

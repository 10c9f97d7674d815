"""Training and sampling at Qwen3-8B shape on one GPU: ours against peft + transformers.

    python benchmarks/gpu.py [--no-bar] [--write] [--no-peer] [--only train,tenants,sample]
    python benchmarks/gpu.py --only moe,hybrid,oss,long,long_decode,whole

Random weights, bf16, rank 32 on every linear of the layers (the peer's users do not adapt the head,
so neither do we here). Ours and the peer run in one process, one after the other on a freed GPU:
two 16 GB models and their activations do not fit side by side. The rooflines are measured first, on
the same card: bf16 matrix products and device copies.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import report

from tinkex.contract.optimizers import AdamParams
from tinkex.engine import jobs
from tinkex.engine.cuda.fused import CudaDecoder
from tinkex.engine.device.backend import ops_for
from tinkex.engine.lora.adapter import Adapter, fresh_adapter
from tinkex.engine.model.shape import ModelConfig, RopeConfig
from tinkex.engine.model.weights import RandomWeights
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.trainer import Trainer

SHAPE = ModelConfig(
    arch="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_size=12288,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    max_context_length=40960,
    qk_norm=True,
)
BASE = "qwen3-8b-shape"
RANK = 32
GIB = 2**30


def num_weights() -> int:
    """Weights that take part in a matrix product: everything but the embedding."""
    d, q = SHAPE.hidden_size, SHAPE.num_heads * SHAPE.head_size
    kv = SHAPE.num_kv_heads * SHAPE.head_size
    layer = d * (q + 2 * kv) + q * d + 3 * d * SHAPE.mlp_size
    return SHAPE.num_layers * layer + d * SHAPE.vocab_size


def seconds(step: Callable[[], object], repeats: int) -> float:
    """Median wall time of a step, the device's work included, after one warm-up."""
    step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def rooflines() -> tuple[float, float]:
    """(bf16 FLOP/s of a large product on random data, bytes/s of a copy, read plus written)."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    flops = 2 * 8192**3 / seconds(lambda: [a @ a for _ in range(20)], 3) * 20
    x = torch.empty(2 << 30, device="cuda", dtype=torch.uint8)
    bandwidth = 2 * x.numel() / seconds(lambda: [x.clone() for _ in range(10)], 3) * 10
    free()
    return flops, bandwidth


# ---------------------------------------------------------------------- training


def datums(lengths: list[int]) -> tuple[jobs.TrainDatum, ...]:
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        tokens = rng.integers(0, SHAPE.vocab_size, length + 1)
        weights = np.ones(length, dtype=np.float32)
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        made.append(jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs))
    return tuple(made)


def our_trainer(num_adapters: int) -> Trainer:
    decoder = CudaDecoder(SHAPE, RandomWeights(SHAPE, device="cuda"), ops=ops_for("cuda"))
    trainer = Trainer(decoder, base_model=BASE)
    for number in range(num_adapters):
        lora = jobs.LoraSpec(rank=RANK, seed=number, train_unembed=False)
        trainer.create(
            jobs.CreateAdapterJob(job_id="", adapter_id=f"a{number}", base_model=BASE, lora=lora)
        )
    return trainer


def our_step(trainer: Trainer, batches: list[tuple[jobs.TrainDatum, ...]]) -> None:
    todo = [
        jobs.TrainJob(job_id="", adapter_id=f"a{i}", data=data, loss_fn="cross_entropy")
        for i, data in enumerate(batches)
    ]
    for result in trainer.train(todo):
        if isinstance(result, Exception):
            raise result
    for job in todo:
        params = AdamParams(learning_rate=1e-5)
        trainer.optim(jobs.OptimJob(job_id="", adapter_id=job.adapter_id, params=params))


EVEN = [2048] * 8
RAGGED = [int(n) for n in np.random.default_rng(0).integers(256, 2049, 8)]


LESS = 16
"""GiB that the backward may keep less than it would, to show the trade."""


@dataclass(frozen=True, slots=True)
class TrainRates:
    """Tokens per second, and GiB."""

    even: float
    peak: float
    ragged: float
    frugal: float
    """The even lengths where less memory is left for what the backward needs."""
    frugal_peak: float


def our_train_rates() -> TrainRates:
    trainer = our_trainer(1)

    def even() -> tuple[float, float]:
        torch.cuda.reset_peak_memory_stats()
        took = seconds(lambda: our_step(trainer, [datums(EVEN)]), 5)
        return sum(EVEN) / took, torch.cuda.max_memory_allocated() / GIB

    rate, peak = even()
    ragged = sum(RAGGED) / seconds(lambda: our_step(trainer, [datums(RAGGED)]), 5)
    less = SHAPE.kept_bytes(EVEN, 2) - LESS * GIB
    trainer.config = replace(trainer.config, activation_bytes=less)
    return TrainRates(rate, peak, ragged, *even())


def deterministic_rates() -> tuple[float, float]:
    """Tokens per second of 64 sequences of 264 tokens, in deterministic mode and without."""
    trainer, lengths = our_trainer(1), [264] * 64
    plain = seconds(lambda: our_step(trainer, [datums(lengths)]), 3)
    trainer.config = replace(trainer.config, deterministic=True)
    with deterministic():
        slower = seconds(lambda: our_step(trainer, [datums(lengths)]), 3)
    return sum(lengths) / slower, sum(lengths) / plain


def small_step_ms() -> float:
    trainer, data = our_trainer(1), datums([64])
    for _ in range(3):  # the second is recorded
        our_step(trainer, [data])
    return 1000 * seconds(lambda: our_step(trainer, [data]), 20)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train_figures(flops: float, peers: bool) -> list[report.Figure]:
    rates = our_train_rates()
    ours = rates.even
    free()
    slower, plain = deterministic_rates()
    free()
    small = small_step_ms()
    free()
    peer, peer_ragged = peer_train_rates() if peers else (None, None)
    free()
    # A frozen weight costs one product forward and one backward (its input's gradient): 4 FLOP.
    achieved = ours * 4 * num_weights()
    return [
        report.Figure(
            name="gpu_train_8x2048",
            ours=ours,
            peer=peer,
            unit="tokens/s",
            bar=1.4 if peers else None,
            note=f"{achieved / 1e12:.0f} TFLOP/s in matrix products, {achieved / flops:.0%} of "
            f"the card's {flops / 1e12:.0f}",
        ),
        report.Figure(name="gpu_train_peak_memory", ours=rates.peak, unit="GiB", bar=70),
        report.Figure(
            name="gpu_train_with_less_memory",
            ours=rates.frugal,
            peer=ours,
            unit="tokens/s",
            note=f"peak {rates.frugal_peak:.1f} GiB: some layers keep less and compute it again; "
            "peer: ours with all the memory it takes",
        ),
        report.Figure(
            name="gpu_train_ragged",
            ours=rates.ragged,
            peer=peer_ragged,
            unit="tokens/s",
            note=f"8 datums of {min(RAGGED)} to {max(RAGGED)} tokens; the peer fills them up",
        ),
        report.Figure(
            name="gpu_train_deterministic",
            ours=slower,
            peer=plain,
            unit="tokens/s",
            bar=1 / 1.3,
            note="64 x 264 tokens; peer: ours without --deterministic",
        ),
        report.Figure(name="gpu_train_64_token_step", ours=small, unit="ms", bar=40),
    ]


def tenant_seconds(num: int) -> tuple[float, float]:
    """(all tenants in one call, one tenant after the other), each with its optimizer step."""
    trainer, data = our_trainer(num), datums([128])

    def one_by_one() -> None:
        for number in range(num):
            job = jobs.TrainJob(
                job_id="", adapter_id=f"a{number}", data=data, loss_fn="cross_entropy"
            )
            trainer.train([job])
            params = AdamParams(learning_rate=1e-5)
            trainer.optim(jobs.OptimJob(job_id="", adapter_id=f"a{number}", params=params))

    return seconds(lambda: our_step(trainer, [data] * num), 5), seconds(one_by_one, 3)


def tenant_figures() -> list[report.Figure]:
    together, alone = tenant_seconds(16)
    free()
    return [
        report.Figure(
            name="gpu_16_tenants_packed", ours=16 * 128 / together, peer=16 * 128 / alone,
            unit="tokens/s", note="peer: the same work, ours too, one tenant at a time",
        ),
        report.Figure(
            name="gpu_16_tenants_floor", ours=16 * 128 / together, unit="tokens/s", bar=10_000,
        ),
    ]  # fmt: skip


def peer_model() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_size,
        intermediate_size=SHAPE.mlp_size,
        max_position_embeddings=SHAPE.max_context_length,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(torch.bfloat16)


def peer_train_rates() -> tuple[float, float]:
    """Tokens per second of equal lengths and of ragged ones, filled up to the longest."""
    from peft import LoraConfig, get_peft_model

    # bf16 adapters: faster for the peer than its fp32 default, which does not fit the card here.
    model = get_peft_model(
        peer_model(),
        LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear"),
        autocast_adapter_dtype=False,
    )
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-5)

    def rate(lengths: list[int]) -> float:
        data, longest = datums(lengths), max(lengths)
        tokens = torch.zeros(len(data), longest, dtype=torch.long, device="cuda")
        for row, datum in zip(tokens, data, strict=True):
            row[: len(datum.tokens)] = torch.as_tensor(datum.tokens)
        places = torch.arange(longest, device="cuda")
        mask = places < torch.tensor(lengths, device="cuda")[:, None]
        filled = {} if mask.all() else {"attention_mask": mask.long()}
        targets = [torch.as_tensor(datum.inputs["target_tokens"]).cuda() for datum in data]

        def step() -> None:
            # Logits a row at a time: the whole batch's would need 10 GB on their own.
            hidden = model.base_model.model.model(input_ids=tokens, **filled).last_hidden_state
            head = model.base_model.model.lm_head
            loss = sum(
                torch.nn.functional.cross_entropy(head(h[: len(t)]).float(), t, reduction="sum")
                for h, t in zip(hidden, targets, strict=True)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return sum(lengths) / seconds(step, 3)

    return rate(EVEN), rate(RAGGED)


# ---------------------------------------------------------------------- sampling


def our_sampler() -> Sampler:
    decoder = CudaDecoder(SHAPE, RandomWeights(SHAPE, device="cuda"), ops=ops_for("cuda"))
    return Sampler(decoder, SamplerConfig(kv_bytes=40 * GIB, max_pass_tokens=8192))


def some_adapters(sampler: Sampler, count: int) -> list[Adapter]:
    """Rank 32 on every linear of the layers, with a B that is not zero."""
    made = []
    for seed in range(count):
        adapter = fresh_adapter(
            sampler.decoder.targets, rank=RANK, alpha=32, kinds=("attn", "mlp"), seed=seed,
            device="cuda",
        )  # fmt: skip
        made.append(adapter.frozen_copy())
        made[-1].flat.normal_(0, 0.01)
    return made


def add_jobs(
    sampler: Sampler, batch: int, prompt: int, new: int, adapters: Sequence[Adapter] = ()
) -> list[object]:
    """Queue `batch` samples of fresh prompts; the list fills with how they end."""
    rng = np.random.default_rng(time.monotonic_ns())  # new prompts: no prefix is cached yet
    ends: list[object] = []
    for number in range(batch):
        job = jobs.SampleJob(
            job_id=f"{batch}-{number}-{time.monotonic_ns()}",
            base_model=BASE,
            adapter_folder=None,
            prompt=rng.integers(0, SHAPE.vocab_size, prompt),
            max_tokens=new,
            stop_tokens=(),
        )
        if adapters:
            number %= len(adapters)
            sampler.add(job, adapters[number], ends.append, version=str(number))
        else:
            sampler.add(job, None, ends.append)
    return ends


def our_decode(
    sampler: Sampler, batch: int, prompt: int, new: int, adapters: Sequence[Adapter] = ()
) -> tuple[float, float]:
    """(steps that decode the whole batch, all of prefill and decode) in tokens per second."""
    ends = add_jobs(sampler, batch, prompt, new, adapters)
    torch.cuda.synchronize()
    began = time.perf_counter()
    full: list[float] = []  # when they ended; those whose prompt came first also leave first
    while sampler.has_work:
        if sampler.step() == batch:
            full.append(time.perf_counter())
    ended = time.perf_counter()
    assert len(ends) == batch
    steady = batch * (len(full) - 1) / (full[-1] - full[0]) if len(full) > 1 else math.nan
    return steady, batch * new / (ended - began)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second."""

    decode: float
    """At batch 128."""
    whole: float
    """The same with its prefill."""
    single: float
    one_adapter: float
    many_adapters: float
    """16 of them."""
    single_adapter: float
    adapter_size: int
    """Numbers in an adapter."""
    prefill: float
    group: float
    """Seconds for 16 samples of a prompt of 8k, over those for one."""
    next_turn: float
    """Seconds for 64 tokens more on a prompt of 8k that is cached, over those for all of it."""


def our_rates() -> Rates:
    sampler = our_sampler()

    def rates(batch: int, adapters: Sequence[Adapter] = ()) -> tuple[float, float]:
        our_decode(sampler, batch, 512, 24, adapters)  # records the graphs
        return our_decode(sampler, batch, 512, 128, adapters)

    decode, whole = rates(128)
    many = some_adapters(sampler, 16)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, SHAPE.vocab_size, 8192) for _ in range(3)]
    longer, also = (np.concatenate([p, prompts[1][:64]]) for p in (prompts[0], prompts[2]))
    prompt_seconds(sampler, prompts[2], 1)
    prompt_seconds(sampler, also, 1)  # compiles what a chunk of 64 tokens takes
    once = prompt_seconds(sampler, prompts[0], 1)
    next_turn = prompt_seconds(sampler, longer, 1) / once  # while its beginning is cached
    our_decode(sampler, 64, 2048, 1)
    return Rates(
        decode=decode,
        whole=whole,
        single=rates(1)[0],
        one_adapter=rates(128, many[:1])[0],
        many_adapters=rates(128, many)[0],
        single_adapter=rates(1, many[:1])[0],
        adapter_size=many[0].flat.numel(),
        prefill=64 * 2048 * our_decode(sampler, 64, 2048, 1)[1] / 64,
        group=prompt_seconds(sampler, prompts[1], 16) / once,
        next_turn=next_turn,
    )


def prompt_seconds(sampler: Sampler, prompt: np.ndarray, num_samples: int) -> float:
    """From a prompt to one token of each of its samples."""
    job = jobs.SampleJob(
        job_id=str(time.monotonic_ns()), base_model=BASE, adapter_folder=None, prompt=prompt,
        num_samples=num_samples, max_tokens=1, stop_tokens=(),
    )  # fmt: skip
    torch.cuda.synchronize()
    began = time.perf_counter()
    sampler.add(job, None, lambda event: None)
    while sampler.has_work:
        sampler.step()
    return time.perf_counter() - began


def peer_rates() -> tuple[float, float, float]:
    """The same of transformers' `generate`; decode alone from the difference of two lengths."""
    model = peer_model().eval()
    prompts = torch.randint(0, SHAPE.vocab_size, (128, 512), device="cuda")
    short, long = (peer_generate_seconds(model, prompts, new) for new in (32, 128))
    one_short, one_long = (peer_generate_seconds(model, prompts[:1], new) for new in (16, 80))
    return 128 * 96 / (long - short), 128 * 128 / long, 64 / (one_long - one_short)


def sample_figures(flops: float, bandwidth: float, peers: bool) -> list[report.Figure]:
    ours = our_rates()
    free()
    peer_decode, peer_whole, peer_single = peer_rates() if peers else (None, None, None)
    free()
    kv = 128 * 576 * 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_size * 2

    def roofline(rate: float, num_adapters: int = 0) -> str:
        """What reading weights, KV cache and adapters once a step allows, and how near we are."""
        weights = num_weights() + num_adapters * ours.adapter_size
        limit = 128 / ((2 * weights + kv) / bandwidth)
        return f"{rate / limit:.0%} of the roofline ({limit:.0f} tokens/s)"

    # Without the head, which a prompt passes once; half of the scores are masked.
    attention = 2 * SHAPE.num_layers * SHAPE.num_heads * SHAPE.head_size * 2048
    per_token = 2 * (num_weights() - SHAPE.hidden_size * SHAPE.vocab_size) + attention
    return [
        report.Figure(
            name="gpu_decode_batch_128", ours=ours.decode, peer=peer_decode, unit="tokens/s",
            note=roofline(ours.decode),
        ),
        report.Figure(name="gpu_decode_128_floor", ours=ours.decode, unit="tokens/s", bar=8500),
        report.Figure(
            name="gpu_generate_128x512+128", ours=ours.whole, peer=peer_whole, unit="tokens/s",
            note="prefill included",
        ),
        report.Figure(
            name="gpu_decode_batch_1", ours=ours.single, peer=peer_single, unit="tokens/s",
            note=f"{ours.single / (bandwidth / 2 / num_weights()):.0%} of the roofline",
        ),
        report.Figure(name="gpu_decode_1_floor", ours=ours.single, unit="tokens/s", bar=60),
        report.Figure(
            name="gpu_decode_128_one_adapter", ours=ours.one_adapter, peer=ours.decode,
            unit="tokens/s",
            note=f"{roofline(ours.one_adapter, 1)}; rank 32 on every linear; peer: ours without",
        ),
        report.Figure(
            name="gpu_decode_128_16_adapters", ours=ours.many_adapters, peer=ours.decode,
            unit="tokens/s",
            note=f"{roofline(ours.many_adapters, 16)}; 8 samples of each; peer: ours without",
        ),
        report.Figure(
            name="gpu_decode_1_one_adapter", ours=ours.single_adapter, peer=ours.single,
            unit="tokens/s", note="peer: ours without an adapter",
        ),
        report.Figure(
            name="gpu_prefill_64x2048", ours=ours.prefill, unit="tokens/s",
            note=f"{ours.prefill * per_token / flops:.0%} of the card's FLOP/s",
        ),
        report.Figure(
            name="gpu_group_of_16", ours=ours.group, unit="",
            note="seconds for 16 samples of a prompt of 8k, over those for one",
        ),
        report.Figure(
            name="gpu_next_turn", ours=ours.next_turn, unit="",
            note="seconds for 64 new tokens behind 8k cached ones, over those for all",
        ),
    ]  # fmt: skip


@torch.inference_mode()
def peer_generate_seconds(model: torch.nn.Module, prompts: torch.Tensor, new: int) -> float:
    options = {"do_sample": True, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    mask = torch.ones_like(prompts)
    return seconds(lambda: model.generate(prompts, attention_mask=mask, **options), 1)


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", default="train,tenants,sample")
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    flags = parser.parse_known_args()[0]
    only, peers = flags.only.split(","), not flags.no_peer
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    flops, bandwidth = rooflines()
    figures: list[report.Figure] = []
    figures += train_figures(flops, peers) if "train" in only else []
    figures += tenant_figures() if "tenants" in only else []
    figures += sample_figures(flops, bandwidth, peers) if "sample" in only else []
    if set(only) & {"moe", "hybrid", "oss", "long", "long_decode", "whole"}:
        import gpu_families

        figures += gpu_families.figures(only, peers=peers)
        return report.finish("gpu_families", figures)
    return report.finish("gpu", figures)


if __name__ == "__main__":
    sys.exit(main())

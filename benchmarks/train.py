"""LoRA training on the default model: ours against peft + transformers, interleaved in one process.

    python benchmarks/train.py [--no-bar] [--write] [--repeats 5] [--only peft,tenants]

`train_cpu_vs_peft`: tokens per second of one forward-backward and optimizer step over 8 datums of
ragged length (32-256) at rank 32 in fp32; the peer pads them to one batch, as its users do.
`train_cpu_packed_tenants`: 16 tenants with one 128-token datum each, packed together, against the
same work one tenant at a time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import report

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.jobs import (
    CreateAdapterJob,
    LoraSpec,
    OptimJob,
    TrainDatum,
    TrainJob,
)
from tinkex.engine.model import default_model
from tinkex.engine.train.trainer import Trainer

RANK, NUM_DATUMS, NUM_TENANTS, TENANT_LENGTH = 32, 8, 16, 128


def datums(lengths: list[int], vocab_size: int) -> list[TrainDatum]:
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length + 1)
        weights = np.ones(length, dtype=np.float32)
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        made.append(TrainDatum(tokens=tokens[:-1], inputs=inputs))
    return made


def our_trainer(num_adapters: int) -> Trainer:
    name = default_model.NAME
    trainer = Trainer(load_decoder(str(default_model.folder())), base_model=name)
    for index in range(num_adapters):
        spec = LoraSpec(rank=RANK, seed=index)
        trainer.create(
            CreateAdapterJob(job_id="", adapter_id=f"a{index}", base_model=name, lora=spec)
        )
    return trainer


def our_step(trainer: Trainer, batches: list[list[TrainDatum]], *, together: bool) -> None:
    jobs = [
        TrainJob(job_id="", adapter_id=f"a{i}", data=tuple(data), loss_fn="cross_entropy")
        for i, data in enumerate(batches)
    ]
    results = trainer.train(jobs) if together else [trainer.train([job])[0] for job in jobs]
    for result in results:
        if isinstance(result, Exception):
            raise result
    for job in jobs:
        params = AdamParams(learning_rate=1e-5)
        trainer.optim(OptimJob(job_id="", adapter_id=job.adapter_id, params=params))


def peer_step(data: list[TrainDatum]) -> Callable[[], None]:
    """peft on transformers, padded to the longest datum, the same targets and loss."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head".split()
    base = AutoModelForCausalLM.from_pretrained(default_model.folder(), dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-5, betas=(0.9, 0.95)
    )
    longest = max(len(datum.tokens) for datum in data)
    tokens_BT = torch.zeros(len(data), longest, dtype=torch.long)
    labels_BT = torch.full((len(data), longest), -100)
    mask_BT = torch.zeros(len(data), longest, dtype=torch.long)
    for row, datum in enumerate(data):
        length = len(datum.tokens)
        tokens_BT[row, :length] = torch.from_numpy(datum.tokens)
        labels_BT[row, :length] = torch.from_numpy(np.asarray(datum.inputs["target_tokens"]))
        mask_BT[row, :length] = 1

    def step() -> None:
        logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def interleaved(ours: Callable[[], None], peer: Callable[[], None], repeats: int) -> list[float]:
    """Median seconds of each, after one warm-up round, taking turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_index in range(repeats + 1):
        for function, kept in zip((ours, peer), seconds, strict=True):
            gc.collect()
            began = time.perf_counter()
            function()
            if round_index:
                kept.append(time.perf_counter() - began)
    return [statistics.median(kept) for kept in seconds]


def against_peft(repeats: int) -> report.Figure:
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    lengths = [int(n) for n in np.linspace(32, 256, NUM_DATUMS)]
    trainer = our_trainer(1)
    data = datums(lengths, trainer.decoder.config.vocab_size)
    ours_s, peer_s = interleaved(
        lambda: our_step(trainer, [data], together=True), peer_step(data), repeats
    )
    return report.Figure(
        name="train_cpu_vs_peft",
        ours=sum(lengths) / ours_s,
        peer=sum(lengths) / peer_s,
        unit="tokens/s",
        bar=1.5,
        note=f"rank {RANK}, {NUM_DATUMS} datums of {lengths[0]}-{lengths[-1]} tokens, fp32",
    )


def packed_tenants(repeats: int) -> report.Figure:
    trainer = our_trainer(NUM_TENANTS)
    vocab_size = trainer.decoder.config.vocab_size
    tenants = [[one] for one in datums([TENANT_LENGTH] * NUM_TENANTS, vocab_size)]
    together_s, apart_s = interleaved(
        lambda: our_step(trainer, tenants, together=True),
        lambda: our_step(trainer, tenants, together=False),
        repeats,
    )
    return report.Figure(
        name="train_cpu_packed_tenants",
        ours=NUM_TENANTS * TENANT_LENGTH / together_s,
        peer=NUM_TENANTS * TENANT_LENGTH / apart_s,
        unit="tokens/s",
        bar=1.0,
        note=f"{NUM_TENANTS} tenants x {TENANT_LENGTH} tokens, packed against one at a time",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="peft,tenants", help="which figures, by comma")
    options, _ = parser.parse_known_args()
    figures = []
    if "peft" in options.only:
        figures.append(against_peft(options.repeats))
    if "tenants" in options.only:
        figures.append(packed_tenants(options.repeats))
    return report.finish("train", figures)


if __name__ == "__main__":
    sys.exit(main())

"""Tiny models of several families, jobs going through a sampler over one, and its oracles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from tinkex.engine import jobs
from tinkex.engine.lora.adapter import Adapter, AdapterSpan, LoraBatch
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.paged import kv_bytes_per_token
from tinkex.engine.sample.sampler import Sampler

VOCAB = 199
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 11}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {}),
    "olmo2-through-transformers": (transformers.Olmo2Config, {"pad_token_id": 0}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gemma3-windows-through-transformers": (
        transformers.Gemma3TextConfig,
        {
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@dataclass
class Model:
    decoder: Any
    oracle: Any
    adapters: dict[str, Adapter] = field(default_factory=dict)
    looks_ahead: bool = False

    def sampler(self, *, kv_tokens: int = 4096, block_size: int = 4, **config: int) -> Sampler:
        per_token = kv_bytes_per_token(self.decoder.config, self.decoder.dtype)
        sampler = Sampler(
            self.decoder,
            SamplerConfig(kv_bytes=kv_tokens * per_token, block_size=block_size, **config),
            detokenizer=lambda: detokenize,
        )
        if self.looks_ahead:
            sampler._graphs = PlainReplay(sampler)  # type: ignore[assignment]
        return sampler


class PlainReplay:
    """Stands where CUDA graphs do, so that the sampler launches a pass before it reads the last.

    As there, the tokens of such a pass come from the tensor they were drawn into.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.num_ahead = 0

    def run(self, chunks, lora, drawn=None):
        sampler = self._sampler
        if drawn is None:
            tokens = [chunk.seq.tokens[chunk.start] for chunk in chunks]
        else:
            assert all(len(chunk.seq.tokens) == chunk.start for chunk in chunks)
            tokens = drawn[0][drawn[1]].tolist()
            self.num_ahead += 1
        sampler._attend.begin(chunks)
        positions = torch.tensor([chunk.start for chunk in chunks])
        hidden = sampler.decoder.forward(torch.tensor(tokens), positions, sampler._attend, lora)
        return sampler.decoder.head(hidden, lora)


def detokenize(tokens: Any) -> str:
    """Two letters per token, so that stop strings can lie across tokens."""
    return "".join(chr(97 + t // 16) + chr(65 + t % 16) for t in tokens)


class Run:
    """Jobs going through a sampler, with everything they emitted."""

    def __init__(self, model: Model, sampler: Sampler) -> None:
        self.model, self.sampler = model, sampler
        self.events: dict[str, list[jobs.Event]] = {}

    def add(
        self,
        prompt: list[int],
        adapter: str | None = None,
        version: str | None = None,
        **fields: Any,
    ) -> str:
        job_id = f"job{len(self.events)}"
        fields = {"stop_tokens": (), "max_tokens": 8} | fields
        job = jobs.SampleJob(
            job_id=job_id,
            base_model="m",
            adapter_folder=adapter,
            prompt=np.array(prompt),
            **fields,
        )
        self.events[job_id] = []
        weights = self.model.adapters[adapter] if adapter else None
        self.sampler.add(job, weights, self.events[job_id].append, version)
        return job_id

    def finish(self) -> None:
        for _ in range(5000):
            if not self.sampler.has_work:
                return
            self.sampler.step()
        raise AssertionError("the sampler did not finish")

    def waits(self, job_id: str) -> list[str]:
        return [e.text for e in self.events[job_id] if isinstance(e, jobs.Progress)]

    def result(self, job_id: str) -> jobs.SampleResult:
        self.finish()
        end = self.events[job_id][-1]
        assert isinstance(end, jobs.Done), end
        assert isinstance(end.result, jobs.SampleResult)
        return end.result

    def tokens(self, job_id: str) -> list[list[int]]:
        return [s.tokens.tolist() for s in self.result(job_id).sequences]


def sample(model: Model, prompt: list[int], sampler: Sampler | None = None, **fields: Any) -> Any:
    run = Run(model, sampler or model.sampler())
    return run.result(run.add(prompt, **fields))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, VOCAB, length).tolist()


def greedy_oracle(model: Model, prompt: list[int], num_tokens: int) -> list[int]:
    generated = model.oracle.generate(
        torch.tensor([prompt]),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()


@torch.no_grad()
def trainer_logprobs(model: Model, tokens: list[int], adapter: str | None = None) -> np.ndarray:
    """What a training pass computes: logprob of every token after the first."""
    ids = torch.tensor(tokens)
    weights = model.adapters[adapter] if adapter else None
    lora = LoraBatch([AdapterSpan(0, len(ids) - 1, weights)]) if weights else None
    attend = PackedCausal([0, len(ids) - 1], model.decoder.config.windows)
    hidden = model.decoder.forward(ids[:-1], torch.arange(len(ids) - 1), attend, lora)
    logits = model.decoder.head(hidden, lora)
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()

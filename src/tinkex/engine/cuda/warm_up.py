"""Compile a model's kernels while its weights are still being read.

Kernels are compiled when they are first launched, cuDNN plans then, cuBLAS starts: ten seconds of
the first step on a new machine. `WarmUp` trains a model of the same shape, with one layer and
random weights, in a thread and on a stream of its own. What it compiles stays in Triton's cache on
disk. A failure costs nothing but the warmth: the real first step meets it and tells it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import numpy as np
import torch

from tinkex.contract.optimizers import AdamParams
from tinkex.engine import jobs
from tinkex.engine.cuda.fused import CudaDecoder
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import RandomWeights
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer

log = logging.getLogger(__name__)
_TOKENS = 64
_VOCABULARY = 1024
_RANK = 32
"""The usual one: a kernel's tile follows the rank's power of two."""


class WarmUp:
    """Runs from when it is made; `wait` before the model is used."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        windows = tuple(dict.fromkeys(config.windows))  # a layer of each kind
        self._config = replace(
            config,
            num_layers=max(1, len(windows)),
            windows=windows,
            vocab_size=min(_VOCABULARY, config.vocab_size),
        )
        self._ops, self._device = ops, ops.device
        self._thread = threading.Thread(target=self._run, name="warm-up", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is compiled; the memory that it took is free again."""
        self._thread.join()
        torch.cuda.empty_cache()

    def _run(self) -> None:
        try:
            with (
                torch.cuda.device(self._device),
                # A stream of its own: weights are copied to the card on the default one meanwhile.
                torch.cuda.stream(torch.cuda.Stream(self._device)),
            ):
                self._train()
                torch.cuda.current_stream().synchronize()
        except Exception:
            log.exception("warming up failed; the first step will be slower")

    def _train(self) -> None:
        # Kernels are chosen by shapes, not by values: random weights compile the same ones.
        weights = RandomWeights(self._config, device=str(self._device))
        decoder = CudaDecoder(self._config, weights, ops=self._ops)
        trainer = Trainer(decoder, base_model="", config=TrainerConfig())
        lora = jobs.LoraSpec(rank=_RANK, seed=0)
        trainer.create(jobs.CreateAdapterJob(job_id="", adapter_id="", base_model="", lora=lora))
        tokens = np.arange(_TOKENS + 1) % self._config.vocab_size
        inputs: dict[str, jobs.Array | jobs.CsrArray] = {
            "target_tokens": tokens[1:],
            "weights": np.ones(_TOKENS, np.float32),
        }
        datum = jobs.TrainDatum(tokens=tokens[:-1], inputs=inputs)
        job = jobs.TrainJob(job_id="", adapter_id="", data=(datum,), loss_fn="cross_entropy")
        (result,) = trainer.train([job])
        if isinstance(result, Exception):
            raise result
        params = AdamParams(learning_rate=0.0)
        trainer.optim(jobs.OptimJob(job_id="", adapter_id="", params=params))

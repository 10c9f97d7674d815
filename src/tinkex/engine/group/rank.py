"""What one rank of a group computes with: its shard of a base model, a trainer and a sampler.

The leader and its followers make theirs the same way, so that all have equal settings. The kernels
of `engine.cuda` are not used: they fuse across the edges at which ranks come together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tinkex.engine.collectives.group import Group
from tinkex.engine.device.backend import ops_for
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.model.loading import check_room
from tinkex.engine.model.sharding import check_divides
from tinkex.engine.model.weights import WeightReader, open_weights
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.sample.stopping import load_detokenizer
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer


def load_shard(
    group: Group,
    source: ModelSource,
    dtype: torch.dtype | None,
    weights: WeightReader | None = None,
) -> Decoder:
    """This rank's shard of a base model."""
    config = source.config()
    check_divides(config, group.size, source.name)
    ops = ops_for(group.device)
    dtype = ops.compute_dtype(dtype)
    # Ranks on one CPU share its memory; on CUDA each has a card of its own.
    parts = 1 if group.device.type == "cpu" else group.size
    check_room(config, source.name, ops, dtype, parts)
    reader = weights or open_weights(source, config)
    return Decoder(config, reader, ops=ops, dtype=dtype, group=group)


def make_trainer(
    decoder: Decoder,
    base_model: str,
    config: TrainerConfig | None,
    base: Base,
    after_pass: Callable[[], None],
) -> Trainer:
    return Trainer(decoder, base_model=base_model, config=config, base=base, after_pass=after_pass)


def make_sampler(decoder: Decoder, config: SamplerConfig | None, source: ModelSource) -> Sampler:
    exact = decoder.group.exact
    config = config or SamplerConfig.for_device(decoder.ops, deterministic=exact)
    return Sampler(decoder, config, lambda: load_detokenizer(source.path))

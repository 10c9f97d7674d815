"""A real group of two: this process leads, the other one was started by it.

Both ranks do whatever a test asks of the leader's trainer or sampler, over gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
from table import Model, make

from tinkex.engine.group.leader import Leader
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer


@pytest.fixture(scope="session")
def leader() -> Iterator[Leader]:
    with pytest.MonkeyPatch.context() as patch:
        # The follower gives back what it frees, so that a limit on its memory is one on its needs.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        leader = Leader(("cpu", "cpu"), torch.device("cpu"), threads=1, timeout_s=60)

    def fail(text: str) -> None:
        raise AssertionError(f"the group was lost: {text}")

    leader.group.on_loss = fail
    yield leader
    leader.close()


@dataclass(frozen=True)
class Pair:
    """One model alone, and the same model sharded over the group."""

    model: Model
    alone: Trainer
    group: Trainer
    leader: Leader

    def samplers(self, **options: object) -> tuple[Sampler, Sampler]:
        config = SamplerConfig(**({"kv_bytes": 1 << 22, "block_size": 4} | options))
        source = ModelSource(self.model.family, self.model.folder)
        led = self.leader.sampler(self.group.decoder, config, source)
        return Sampler(self.alone.decoder, config), led


@pytest.fixture(scope="session")
def pair(leader, tmp_path_factory) -> Callable[..., Pair]:
    """`pair(family)`: its model is made once per session, its trainers anew."""
    made: dict[str, Model] = {}

    def get(family: str, dtype: torch.dtype | None = None, **config: int) -> Pair:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp(family))
        model, base = made[family], Base(family, "0123")
        config = TrainerConfig(**({"max_tokens": 40} | config))
        alone = Trainer(model.decoder(dtype), base_model=family, config=config, base=base)
        decoder = leader.load(ModelSource(family, model.folder), dtype=dtype)
        led = leader.trainer(
            decoder, base_model=family, config=config, base=base, after_pass=lambda: None
        )
        return Pair(model, alone, led, leader)

    return get

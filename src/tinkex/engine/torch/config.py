"""How an engine runs: its device, its memory, and how it shares the device's time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tinkex.engine.device.backend import find_device
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.train.config import TrainerConfig
from tinkex.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: the GPU when there is one. `auto:N` is the GPU of the
    worker with that number when there are GPUs."""
    deterministic: bool = False
    """Equal jobs in equal order give equal bits; training jobs never share a pass."""
    threads: int | None = None
    """CPU threads for the mathematics; None leaves torch's choice."""
    sampler: SamplerConfig | None = None
    """None: what fits the device."""
    trainer: TrainerConfig | None = None
    """None: what fits the device."""
    max_models: int = 2
    """Base models kept in memory; more are kept only while they are in use."""
    snapshot_bytes: int | None = None
    """Memory for sampling weights that no running job uses. None: a 32nd of the machine's, from
    256 MiB to 2 GiB; what is forgotten is read from disk again."""
    idle_s: float = 300.0
    """After so long without work, what can be made again is given up: on a CPU the KV cache and
    packed copies, and everywhere what the allocators keep."""
    train_share: float = 0.5
    """Share of the device's time for training while both have work."""
    any_base: bool = False
    """Use checkpoints of other base weights too, with a warning."""
    group: tuple[str, ...] = ()
    """The devices of a group that holds each base model together; the first is `device`, the others
    are followers' in processes of their own. Empty: one device holds it alone."""
    group_timeout_s: float = 120.0
    """A group ends when a member keeps the others waiting for longer in the middle of a pass."""

    def __post_init__(self) -> None:
        if not 0 < self.train_share < 1:
            raise ConfigError(
                f"engine.train_share must be between 0 and 1, got {self.train_share}. "
                "Raise it if training starves, lower it if sampling does."
            )
        if self.max_models < 1 or (self.threads is not None and self.threads < 1):
            raise ConfigError(
                f"engine.max_models and engine.threads must be at least 1, got {self.max_models} "
                f"and {self.threads}"
            )

    def torch_device(self) -> torch.device:
        return find_device(self.device)

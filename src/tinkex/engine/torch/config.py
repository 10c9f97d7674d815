"""How an engine runs: its device, its memory, and how it shares the device's time."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tinkex.engine.sample.sampler import SamplerConfig
from tinkex.engine.train.trainer import TrainerConfig
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
        kind, _, number = self.device.partition(":")
        if kind == "auto":
            if not torch.cuda.is_available():
                return torch.device("cpu")
            if number and int(number) >= torch.cuda.device_count():
                raise ConfigError(
                    f"worker {number} has no GPU: there are {torch.cuda.device_count()}. Start "
                    "with --workers (times --group) of at most that many, or with --device cpu."
                )
            return torch.device(f"cuda:{number}" if number else "cuda")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= max(1, torch.cuda.device_count()):
            raise ConfigError(
                f"engine.device is {self.device!r}, but torch sees "
                f"{torch.cuda.device_count()} GPUs, counted from cuda:0"
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"engine.device is {self.device!r}, but torch sees no GPU; use 'cpu'")
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"engine.device is {self.device!r}: only CUDA cards and CPUs are supported. Use "
                "'cpu', which runs on an Apple machine too."
            )
        return device


def make_cuda_deterministic() -> None:
    """Choose kernels that add in one order. Costs speed; must run before CUDA's first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)

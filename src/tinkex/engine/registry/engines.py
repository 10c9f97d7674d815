"""The table of engines: what each can do, and how one is made.

The server reads here what it must know of an engine before there is one, and never asks which one
it has. Importing this loads no engine. To add an engine, add a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.engine.folders import CONFIG, TOY_MANIFEST, WEIGHTS
from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.engine.jobs import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to make."""

    engine: str
    """A name of `ENGINES`, settings of the engine's own behind a colon."""
    device: str = "auto"
    """Of a group: its members' devices, with a plus between them; see `engine.group`."""
    group_timeout_s: float = 120.0
    deterministic: bool = False
    any_base: bool = False
    models: tuple[str, ...] = ()
    """The base models that there are; empty: whatever is asked for."""
    threads: int | None = None
    """CPU threads of the engine; None: all. Workers that share a machine share its cores."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine as the server knows it."""

    name: str
    says: str
    """One clause for `--help`."""
    make: Callable[[EngineSpec], Engine]
    check_settings: Callable[[str], None] | None = None
    """Refuses wrong settings behind the colon of `NAME:SETTINGS`; None: there are none."""
    uses_devices: bool
    """Computes on GPUs, and in groups of devices."""
    loads_models: bool
    """Base models are weights that have to be found. Otherwise any name is a base model."""
    custom_losses: bool
    """Traced losses of a user may run here."""
    splits_exactly: bool
    """A pass gives the same bits however it is split, also without `deterministic`."""
    adapter_files: tuple[str, ...]
    """Files of an exported adapter that make it whole again."""
    note: str
    """What a person who starts a server should know about its answers."""


def engine_kind(engine: str) -> EngineKind:
    """The row of an engine by its name, settings behind a colon included.

    Raises:
        ConfigError: There is no such engine, or it has no such settings.
    """
    name, colon, _ = engine.partition(":")
    kind = ENGINES.get(name)
    if kind is None or (colon and kind.check_settings is None):
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}.")
    if kind.check_settings is not None:
        kind.check_settings(engine)
    return kind


def make_engine(spec: EngineSpec) -> Engine:
    """Start an engine in this process.

    Raises:
        ConfigError: It cannot run with this spec here.
    """
    return engine_kind(spec.engine).make(spec)


def _make_torch(spec: EngineSpec) -> Engine:
    from tinkex.engine.torch.config import EngineConfig
    from tinkex.engine.torch.engine import TorchEngine

    device, *others = spec.device.split("+")
    if others:
        from tinkex.engine.group.leader import check_models

        check_models(spec.models, 1 + len(others))
    config = EngineConfig(
        device=device,
        group=(device, *others) if others else (),
        group_timeout_s=spec.group_timeout_s,
        deterministic=spec.deterministic,
        threads=spec.threads,
        any_base=spec.any_base,
    )
    return TorchEngine(config)


def _make_toy(spec: EngineSpec) -> Engine:
    from tinkex.engine.toy.config import ToyConfig
    from tinkex.engine.toy.engine import toy_engine

    models = frozenset(spec.models) or None
    return toy_engine(ToyConfig.read(spec.engine, models=models, deterministic=spec.deterministic))


def _check_toy(engine: str) -> None:
    from tinkex.engine.toy.config import ToyConfig

    ToyConfig.read(engine)


_TORCH = EngineKind(
    name="torch",
    says="torch computes",
    make=_make_torch,
    uses_devices=True,
    loads_models=True,
    custom_losses=True,
    splits_exactly=False,
    adapter_files=(CONFIG, WEIGHTS),
    note="loaded when first used",
)
_TOY = EngineKind(
    name="toy",
    says="toy, or toy:latency_s=0.1, is for tests",
    make=_make_toy,
    check_settings=_check_toy,
    uses_devices=False,
    loads_models=False,
    custom_losses=False,
    splits_exactly=True,
    adapter_files=(CONFIG, "adapter_model.npz", TOY_MANIFEST),
    note="toy engine: for tests, its answers mean nothing",
)
ENGINES = {kind.name: kind for kind in (_TORCH, _TOY)}

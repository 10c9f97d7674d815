"""Settings of the toy engine. The server knows none of them: it passes on what `--engine` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tinkex.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    vocab_size: int = 49152
    """Same as the default model, so that its tokenizer fits."""
    max_context_length: int = 32768
    models: frozenset[str] | None = None
    """Base models that exist; None: every name does."""
    latency_s: float = 0.0
    """Artificial time per job."""
    token_latency_s: float = 0.0
    """Artificial time per sampled token; a streaming job emits each token at its time."""
    train_token_latency_s: float = 0.0
    """Artificial time per token of a training pass; passes of all adapters take turns then."""
    max_running: int = 0
    """Samples that are generated at the same time; 0: any number."""
    adapter_bytes: int = 0
    """Weight that every checkpoint has beside its table, as a real adapter has."""
    hang_token: int = -1
    """Data and prompts that begin with it hang the engine for good, as a bug would; -1: none."""
    deterministic: bool = True
    """Jobs without a seed take one from their content, so that equal jobs give equal samples."""
    num_snapshots: int = 256
    """Sampling snapshots kept in memory; others are read again from their folder."""

    @property
    def takes_time(self) -> bool:
        """Whether anything has an artificial latency."""
        return max(self.latency_s, self.token_latency_s, self.train_token_latency_s) > 0

    @classmethod
    def read(cls, engine: str, **given: Any) -> ToyConfig:
        """The settings in `toy:latency_s=0.1,token_latency_s=0.2`, beside those `given`.

        Raises:
            ConfigError: One is unknown, or no number.
        """
        kinds: dict[str, Callable[[str], float]] = {
            f.name: float if isinstance(f.default, float) else int
            for f in fields(cls)
            if type(f.default) in (int, float)
        }
        _, _, text = engine.partition(":")
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            try:
                given[name] = kinds[name](value)
            except (KeyError, ValueError):
                known = ", ".join(sorted(kinds))
                raise ConfigError(
                    f"engine: {pair!r} is no setting of the toy. Write "
                    f"toy:NAME=NUMBER,..., with names of {known}."
                ) from None
        return cls(**given)

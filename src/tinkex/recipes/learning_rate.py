"""The learning rate of a run: a first guess of its peak, and its course over the steps.

The guess is that of "LoRA Without Regret" (Schulman and Thinking Machines Lab, 2025,
https://thinkingmachines.ai/blog/lora/): LoRA wants about ten times the rate of full fine-tuning,
nearly whatever its rank, and models want less of it the wider they are. The exponents were fitted
there to Llama and Qwen models; `docs/hyperparameters.md` says what that is worth elsewhere.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from tinkex.contract.models import MAX_RANK
from tinkex.errors import ConfigError

__all__ = ["Schedule", "get_lr", "learning_rate_at"]

Schedule = Literal["linear", "cosine", "constant"]
FLOOR = 0.1
"""Where `linear` and `cosine` end, as a share of the peak."""

_FULL_RATE = 5e-5
_LORA_FACTOR = 10.0
_WIDTH = 2000
_EXPONENTS = {"llama": 0.781, "smollm": 0.781, "qwen": 0.0775}
"""How fast the rate falls with the width. SmolLM2 has the architecture of Llama."""
_WIDTHS = {
    "smollm2-135m": 576,
    "smollm2-360m": 960,
    "smollm2-1.7b": 2048,
    "llama-3.2-1b": 2048,
    "llama-3.2-3b": 3072,
    "llama-3.1-8b": 4096,
    "llama-3.1-70b": 8192,
    "llama-3.3-70b": 8192,
    "qwen2.5-0.5b": 896,
    "qwen2.5-1.5b": 1536,
    "qwen2.5-3b": 2048,
    "qwen2.5-7b": 3584,
    "qwen2.5-14b": 5120,
    "qwen2.5-32b": 5120,
    "qwen2.5-72b": 8192,
    "qwen3-0.6b": 1024,
    "qwen3-1.7b": 2048,
    "qwen3-4b": 2560,
    "qwen3-8b": 4096,
    "qwen3-14b": 5120,
    "qwen3-32b": 5120,
    "qwen3-30b-a3b": 2048,
    "qwen3-235b-a22b": 4096,
}
"""`hidden_size` of models that are often served elsewhere, so that their files are not here."""


def get_lr(model: str, rank: int = 32, *, hidden_size: int | None = None) -> float:
    """A peak learning rate to begin with, for supervised LoRA training with Adam.

    5e-5 * 10 * (2000 / hidden_size) ** exponent; the exponent is 0.781 for Llama's family, 0.0775
    for Qwen's, and 0 for others, where nobody has published one.

    Args:
        model: A base model's name, or the folder of one.
        rank: Of the adapter. It does not change the result: alpha / rank scales the adapter, and
            with it the best rate stays about the same from rank 1 to 512.
        hidden_size: The width of the model, where it can be known neither from its name nor from
            a `config.json` on this machine.

    Raises:
        ConfigError: The width of the model is not known here, or the rank cannot be.
    """
    if not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"rank must be from 1 to {MAX_RANK}, got {rank}.")
    family, width = _facts(model)
    width = hidden_size or width
    if not width:
        raise ConfigError(
            f"No learning rate is known for '{model}': its hidden_size is neither in a table nor "
            "in a config.json on this machine. Give a number (1e-3 suits small models, 2e-4 "
            "large ones), or get_lr(..., hidden_size=...)."
        )
    exponent = next((_EXPONENTS[name] for name in _EXPONENTS if name in family), 0.0)
    return float(_FULL_RATE * _LORA_FACTOR * (_WIDTH / width) ** exponent)


def _facts(model: str) -> tuple[str, int | None]:
    """The family of a model and its width, from its config where there is one, else its name."""
    if config := _config(model):
        text = config.get("text_config", config)
        return str(config.get("model_type", "")), text.get("hidden_size")
    name = model.lower()
    known = [key for key in _WIDTHS if key in name]
    return name, _WIDTHS[max(known, key=len)] if known else None


def _config(model: str) -> dict[str, Any]:
    """The `config.json` of a model folder, or of the Hugging Face cache; empty: there is none."""
    file: Any = Path(model) / "config.json"
    if not file.is_file():
        try:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(model, "config.json")
        except (ImportError, ValueError):  # ValueError: no name that the hub could have
            return {}
    if not isinstance(file, str | Path):
        return {}
    try:
        config: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config


def check_schedule(warmup: float) -> None:
    """Refuse a warmup that is neither a share of the steps nor a whole number of them."""
    if not (0 <= warmup < 1 or (math.isfinite(warmup) and warmup == int(warmup) > 0)):
        raise ConfigError(
            f"warmup must be a share of the steps below 1, or a whole number of them, got {warmup}."
        )


def learning_rate_at(
    step: int, num_steps: int, peak: float, schedule: Schedule, warmup: float = 0.0
) -> float:
    """The rate of a step: it rises over the warmup, then falls to a tenth, or stays.

    Args:
        warmup: Steps that it rises for; below 1 the share of all steps.
    """
    # Rounded first: 0.07 * 100 is a bit more than 7 in floats, and no eighth step is meant.
    rise = math.ceil(round(warmup * num_steps, 6)) if warmup < 1 else int(warmup)
    if step < rise:
        return peak * (step + 1) / (rise + 1)
    fall = num_steps - 1 - rise
    if schedule == "constant" or fall < 1:
        return peak
    if schedule == "cosine":
        done = min((step - rise) / fall, 1.0)
        return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)
    return peak * (1 - (1 - FLOOR) * (step - rise) / fall)

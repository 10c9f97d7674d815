"""How far a policy has moved from its own samples while it learns from them.

The first update of a step starts at ratio one; with several updates a step, or samples of older
weights, ratios spread and losses begin to clip. `Shift` counts both over the tokens that are
learned, from what the trainer says of them. Knows arrays; neither models nor loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkex.contract.losses import find_loss, read_settings
from tinkex.types import Datum

__all__ = ["Shift"]


@dataclass(slots=True)
class Shift:
    """Sums over the learned tokens (those with an advantage) of one or several updates."""

    loss_fn: str
    num_tokens: int = 0
    num_clipped: int = 0
    sum_ratio: float = 0.0
    sum_kl: float = 0.0

    def add(self, data: Sequence[Datum], outputs: Sequence[Any]) -> None:
        """Count an update: its data, and the `loss_fn_outputs` that the trainer gave for them."""
        for datum, output in zip(data, outputs, strict=True):
            advantages = np.asarray(datum.loss_fn_inputs["advantages"].to_numpy(), dtype=np.float64)
            is_learned = advantages != 0
            before = np.asarray(datum.loss_fn_inputs["logprobs"].to_numpy(), dtype=np.float64)
            now = np.asarray(output["logprobs"].to_numpy(), dtype=np.float64)
            self._count(advantages[is_learned], (now - before)[is_learned])

    def _count(self, advantages: np.ndarray[Any, Any], gaps: np.ndarray[Any, Any]) -> None:
        ratios = np.exp(gaps)
        self.num_tokens += len(gaps)
        self.sum_ratio += float(ratios.sum())
        # The estimator k3 of http://joschu.net/blog/kl-approx.html, of KL(sampler, policy).
        self.sum_kl += float((ratios - 1 - gaps).sum())
        self.num_clipped += int(self._is_clipped(ratios, advantages).sum())

    def _is_clipped(
        self, ratios: np.ndarray[Any, Any], advantages: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        limits = _limits(self.loss_fn)
        if not limits:
            return np.zeros(ratios.shape, dtype=bool)
        too_low, too_high = ratios < limits[0], ratios > limits[1]
        if self.loss_fn == "cispo":  # It clips the weight of a token, whatever its sign.
            return too_high | too_low
        # ppo takes the smaller of two: the clipped one where it would move on in that direction.
        return (too_high & (advantages > 0)) | (too_low & (advantages < 0))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens; `clip_fraction` only for losses that clip."""
        if not self.num_tokens:
            return {}
        values = {
            "ratio_mean": self.sum_ratio / self.num_tokens,
            "approx_kl": self.sum_kl / self.num_tokens,
        }
        if _limits(self.loss_fn):
            values["clip_fraction"] = self.num_clipped / self.num_tokens
        return values


def _limits(loss_fn: str) -> tuple[float, float] | None:
    """Between which ratios a loss does not clip, by default; None: it never does."""
    settings = read_settings(find_loss(loss_fn), {})
    if "clip_high_threshold" not in settings:
        return None
    return settings["clip_low_threshold"], settings["clip_high_threshold"]

"""What happens between the tokens of a packed stream, for training and scoring.

The decoder computes q, k and v and hands them to an `Attend`, which alone knows where sequences
begin, what is masked, and whether keys and states are cached. `PackedCausal` serves whole sequences
without a cache: each one attends to itself, nothing is padded. The sampler brings its own, paged
one.

Shapes: T tokens of the packed stream, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.delta import DeltaWeights, mix, no_state
from tinkex.engine.model.exact_attention import exact_attention
from tinkex.engine.model.layers import wide


class Attend(Protocol):
    """Owns masks and caches; called once per layer, in layer order."""

    def __call__(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention output [T, H, d]; softmax scale 1/sqrt(d).

        A sink takes part in its head's softmax and adds nothing.
        """
        ...


@runtime_checkable
class RecurrentAttend(Attend, Protocol):
    """Also what delta layers do between tokens."""

    def recur(
        self, layer_index: int, weights: DeltaWeights, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        """Output [T, H, v] of a delta layer; see `delta.mix`."""
        ...


@runtime_checkable
class CachedAttend(Attend, Protocol):
    """Attends to keys and values in a cache, where the decoder writes them itself."""

    def target(self, layer_index: int) -> tuple[Tensor, Tensor, Tensor]:
        """(keys, values, cache row of each token): fill them, then call."""
        ...


class PackedCausal:
    """Causal attention inside each of the sequences that `cu_seqlens` delimits.

    `windows` holds the model's sliding window per layer (None: no window); empty means none at
    all. Runs of equally long sequences go through one batched kernel. With `exact`, on a CPU, a
    token's bits are those that the sampler computes: see `exact_attention`.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int] | Tensor,
        windows: Sequence[int | None] = (),
        *,
        exact: bool = False,
    ) -> None:
        self._exact = exact
        bounds = [int(bound) for bound in cu_seqlens]
        self.lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        self.windows = tuple(windows)
        self._runs = [(length, len(list(run))) for length, run in groupby(self.lengths)]
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        window = self.windows[layer_index] if self.windows else None
        # `split` and not slicing: its backward is one concatenation instead of a zero-filled
        # tensor of the whole stream per sequence.
        sizes = [length * count for length, count in self._runs]
        pieces = zip(
            self._runs, q_THd.split(sizes), k_TKd.split(sizes), v_TKd.split(sizes), strict=True
        )
        outputs = [
            self._run(length, count, window, q, k, v, sinks_H)
            for (length, count), q, k, v in pieces
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def recur(
        self, layer_index: int, weights: DeltaWeights, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        sizes = [length * count for length, count in self._runs]
        outputs = []
        for (length, count), *inputs in zip(
            self._runs, *(t.split(sizes) for t in (x_TC, g_TH, beta_TH)), strict=True
        ):
            x, g, beta = (t.unflatten(0, (count, length)) for t in inputs)
            out_BLHv, _ = mix(weights, x, g, beta, no_state(weights.config, count, x))
            outputs.append(out_BLHv.flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _run(
        self,
        length: int,
        count: int,
        window: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
    ) -> Tensor:
        shape = (count, length)
        q_BHtd, k_BKtd, v_BKtd = (t.unflatten(0, shape).transpose(1, 2) for t in (q, k, v))
        if sinks_H is not None:
            seen = self._window_mask(length, window or length, q.device)
            return attend_with_sinks(q_BHtd, k_BKtd, v_BKtd, seen, sinks_H).flatten(0, 1)
        if self._exact:
            ends_B = torch.full((count,), length)
            out_BHtd = exact_attention(q_BHtd, k_BKtd, v_BKtd, ends_B, window)
            return out_BHtd.transpose(1, 2).flatten(0, 1)
        mask = None
        if window is not None and window < length:
            mask = self._window_mask(length, window, q.device)
        out_BHtd = F.scaled_dot_product_attention(
            q_BHtd,
            k_BKtd,
            v_BKtd,
            mask,
            is_causal=mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out_BHtd.transpose(1, 2).flatten(0, 1)

    def _window_mask(self, length: int, window: int, device: torch.device) -> Tensor:
        """True where a query may look: itself and the `window - 1` tokens before it."""
        if (length, window) not in self._masks:
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            self._masks[length, window] = causal.triu(1 - window)
        return self._masks[length, window]


def attend_with_sinks(
    q_BHtd: Tensor, k_BKld: Tensor, v_BKld: Tensor, seen: Tensor, sinks_H: Tensor
) -> Tensor:
    """Attention [B, t, H, d] in which every head has one more logit, of a key without a value.

    `seen` is true where a query may look, and broadcasts to [B, H, t, l].
    """
    share = q_BHtd.shape[1] // k_BKld.shape[1]
    k_BHld, v_BHld = (t.repeat_interleave(share, dim=1) for t in (k_BKld, v_BKld))
    # A sink is a logit of gpt-oss that takes weight away from the keys; its value is zero.
    scores = wide(q_BHtd @ k_BHld.transpose(-1, -2)) * q_BHtd.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return (shares.to(v_BHld.dtype) @ v_BHld).transpose(1, 2)

"""Causal attention inside each sequence of a packed batch on CUDA, forward and backward.

Two libraries do it. Flash attention takes any mixture of lengths in one call; cuDNN's takes a
rectangle, [B, S], and is nearly twice as fast on Hopper. So a batch is cut into stretches: a run of
sequences of one length is a rectangle as it lies, a very long sequence is one once it is filled up
to a rounder length (no query sees the keys behind it, so the filling changes nothing), what stands
between goes to flash attention. cuDNN plans for a tenth of a second when it meets a new rectangle:
lengths that occur by chance are rounded up, so that there are few.

cuDNN is used once it has agreed with flash attention on this machine, never in deterministic mode
(its backward may add in any order) and never in layers with a sliding window.

Letters: T tokens, B sequences of a rectangle, S their length, H query heads, K key heads, d head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.base_model import ModelConfig
from tinkex.engine.transfer import send

LONG = 2048
"""From this length on a sequence is worth a rectangle of its own, though it must be copied."""
_WORTH = 512
"""From this length on a run of one length is worth a plan."""
_RUN = 4
"""Sequences that are of one length by intent; fewer may be so by chance, and of any length."""

State = tuple[Any, ...]
Three = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""


class PackedFlash:
    """See `attention.Attend`; `forward` and `backward` are the same for who wants gradients."""

    def __init__(self, lengths: Sequence[int], config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._ragged: list[Stretch] = [Ragged.of(0, lengths, device)]
        self._stretches = self._ragged
        heads = (config.num_heads, config.num_kv_heads, config.head_size)
        if not torch.are_deterministic_algorithms_enabled() and cudnn_agrees(*heads, device):
            self._stretches = cut(lengths, device)

    def __call__(self, layer_index: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        return self.forward(layer_index, q_THd, k_TKd, v_TKd)[0]

    def forward(
        self, layer_index: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor
    ) -> tuple[Tensor, list[State]]:
        """The output, and what `backward` needs beside it."""
        window = self._config.window(layer_index)
        outs, states = [], []
        for stretch in self._stretches_of(window):
            rows = stretch.rows
            out, state = stretch.forward((q_THd[rows], k_TKd[rows], v_TKd[rows]), window)
            outs.append(out)
            states.append(state)
        return _joined(outs), states

    def backward(
        self,
        layer_index: int,
        dout_THd: Tensor,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        out_THd: Tensor,
        states: Sequence[State],
    ) -> Three:
        """Gradients of q, k and v."""
        window = self._config.window(layer_index)
        grads = []
        for stretch, state in zip(self._stretches_of(window), states, strict=True):
            rows = stretch.rows
            qkv = (q_THd[rows], k_TKd[rows], v_TKd[rows])
            grads.append(stretch.backward(dout_THd[rows], qkv, out_THd[rows], state, window))
        dqs, dks, dvs = zip(*grads, strict=True)
        return _joined(dqs), _joined(dks), _joined(dvs)

    def _stretches_of(self, window: int | None) -> list[Stretch]:
        return self._stretches if window is None else self._ragged


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# ---------------------------------------------------------------------- the cut


class Stretch(Protocol):
    """Neighbouring sequences of a batch and the kernel that serves them."""

    @property
    def rows(self) -> slice: ...

    def forward(self, qkv: Three, window: int | None) -> tuple[Tensor, State]: ...

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, state: State, window: int | None
    ) -> Three: ...


def cut(lengths: Sequence[int], device: torch.device) -> list[Stretch]:
    """The stretches of a batch, in its order."""
    stretches: list[Stretch] = []
    start, waiting = 0, list[int]()

    def flush() -> None:
        nonlocal start
        if waiting:
            stretches.append(Ragged.of(start, waiting, device))
            start = stretches[-1].rows.stop
            waiting.clear()

    for length, run in groupby(lengths):
        count = len(list(run))
        if length >= _WORTH and (count >= _RUN or length == rounded(length)):
            shapes = [(count, length)]
        elif length >= LONG:
            shapes = [(1, length)] * count
        else:
            waiting += [length] * count
            continue
        flush()
        for shape in shapes:
            stretches.append(Rectangle(start, *shape))
            start = stretches[-1].rows.stop
    flush()
    return stretches


def rounded(length: int) -> int:
    """The next multiple of a sixteenth of the power of two below; at least of 64."""
    step = max(64, 1 << (length.bit_length() - 5))
    return -(-length // step) * step


# ---------------------------------------------------------------------- the two kernels


@dataclass(frozen=True, slots=True)
class Ragged:
    """Flash attention over sequences of any lengths."""

    rows: slice
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, start: int, lengths: Sequence[int], device: torch.device) -> Ragged:
        bounds = np.cumsum([0, *lengths]).astype(np.int32)
        rows = slice(start, start + int(bounds[-1]))
        return cls(rows, send(bounds, device), max(lengths))

    def forward(self, qkv: Three, window: int | None) -> tuple[Tensor, State]:
        out, *state, _ = torch.ops.aten._flash_attention_forward(
            *qkv, self.bounds, self.bounds, self.longest, self.longest, 0.0, True, False,
            **_options(qkv, window),
        )  # fmt: skip
        return out, tuple(state)

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, state: State, window: int | None
    ) -> Three:
        lse, *rng = state
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, *qkv, out, lse, self.bounds, self.bounds, self.longest, self.longest, 0.0, True,
            *rng, **_options(qkv, window),
        )  # fmt: skip
        return dq, dk, dv


def _options(qkv: Three, window: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": qkv[0].shape[-1] ** -0.5}
    if window is not None:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    return options


@dataclass(frozen=True, slots=True)
class Rectangle:
    """cuDNN's attention over sequences of one length, or one sequence filled up with zeros."""

    start: int
    count: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count * self.length)

    def forward(self, qkv: Three, window: int | None) -> tuple[Tensor, State]:
        assert window is None
        out, *state, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(self._boxed, qkv), None, True, 0.0, True, False, **_options(qkv, None)
        )
        return self._flat(out), tuple(state)

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, state: State, window: int | None
    ) -> Three:
        lse, bounds_q, bounds_k, most_q, most_k, *rng = state
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *map(self._boxed, (dout, *qkv, out)), lse, *rng, None, bounds_q, bounds_k, most_q,
            most_k, 0.0, True, **_options(qkv, None),
        )  # fmt: skip
        return self._flat(dq), self._flat(dk), self._flat(dv)

    def _boxed(self, rows: Tensor) -> Tensor:
        if self.count == 1 and (missing := rounded(self.length) - self.length):
            rows = F.pad(rows, (0, 0, 0, 0, 0, missing))
        return rows.view(self.count, -1, *rows.shape[1:]).transpose(1, 2)

    def _flat(self, boxed_BHSd: Tensor) -> Tensor:
        return boxed_BHSd.transpose(1, 2).flatten(0, 1)[: self.count * self.length]


@lru_cache(maxsize=64)
def cudnn_agrees(heads: int, kv_heads: int, head_size: int, device: torch.device) -> bool:
    """Whether cuDNN's attention runs here for such heads and gives flash attention's answers."""
    generator = torch.Generator(device).manual_seed(0)
    count, length = 2, 192
    q, k, v, dout = (
        torch.randn(
            count * length, n, head_size, generator=generator, device=device, dtype=torch.bfloat16
        )
        for n in (heads, kv_heads, kv_heads, heads)
    )
    answers = []
    for stretch in (Ragged.of(0, [length] * count, device), Rectangle(0, count, length)):
        try:
            out, state = stretch.forward((q, k, v), None)
            grads = stretch.backward(dout, (q, k, v), out, state, None)
        except RuntimeError:
            return False
        answers.append((out, *grads))
    return all(
        torch.linalg.vector_norm((a - b).float()) < 0.02 * torch.linalg.vector_norm(a.float())
        for a, b in zip(*answers, strict=True)
    )

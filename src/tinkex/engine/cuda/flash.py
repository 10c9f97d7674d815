"""Causal attention inside each sequence of a packed batch on CUDA, forward and backward.

The forward is our own (`attention`), so that the sampler's logprobs come out of it to the bit. The
backward, which nobody has to repeat, is a library's, from our output and log-sum. Flash attention
takes any mixture of lengths in one call; cuDNN's takes a rectangle, [B, S], and is nearly twice as
fast on Hopper. So a batch is cut into stretches: a run of sequences of one length is a rectangle as
it lies, a very long sequence is one once it is filled up to a rounder length (no query sees the
keys behind it, so the filling changes nothing), what stands between goes to flash attention. cuDNN
plans for a tenth of a second when it meets a new rectangle: lengths that occur by chance are
rounded up, so that there are few.

cuDNN is used once it has agreed with flash attention on this machine, never in deterministic mode
(its backward may add in any order) and never in layers with a sliding window.

Letters: T tokens, B sequences of a rectangle, S their length, H query heads, K key heads, d head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import attention
from tinkex.engine.cuda.transfer import send
from tinkex.engine.model.shape import ModelConfig

LONG = 2048
"""From this length on a sequence is worth a rectangle of its own, though it must be copied."""
_WORTH = 512
"""From this length on a run of one length is worth a plan."""
_RUN = 4
"""Sequences that are of one length by intent; fewer may be so by chance, and of any length."""

Three = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or their gradients."""


class PackedFlash:
    """See `attention.Attend`; `forward` and `backward` are the same for who wants gradients."""

    def __init__(
        self,
        lengths: Sequence[int],
        config: ModelConfig,
        device: torch.device,
        stops: Sequence[int] = (),
    ) -> None:
        """`stops`: the rows at which pieces end that must be kept apart; see `LoraBatch`."""
        self._config, self._lengths, self._device = config, lengths, device
        self._stops = stops
        self._queries = attention.Queries.of(lengths, lengths, device)
        self._ragged: list[Stretch] = []
        self._stretches: list[Stretch] = []

    @classmethod
    def fixed(cls, queries: attention.Queries, longest: int, config: ModelConfig) -> PackedFlash:
        """From tensors whose content may change: any sequences of at most `longest` tokens."""
        packed = cls([], config, queries.bounds_q.device)
        packed._queries = queries
        packed._ragged = [Ragged(slice(None), queries.bounds_q, longest)]
        packed._stretches = packed._ragged
        return packed

    def __call__(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        return self.forward(layer_index, q_THd, k_TKd, v_TKd, sinks_H, with_lse=False)[0]

    def forward(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        sinks_H: Tensor | None = None,
        *,
        with_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the log-sums [H, T] that `backward` needs beside it.

        With a sink both contain it, which is all that the backward has to know of it.
        """
        scale, window = self._config.head_size**-0.5, self._config.window(layer_index)
        return attention.tiles(
            q_THd, k_TKd, v_TKd, self._queries,
            scale=scale, window=window, with_lse=with_lse, sinks_H=sinks_H,
        )  # fmt: skip

    def backward(
        self,
        layer_index: int,
        dout_THd: Tensor,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        out_THd: Tensor,
        lse_HT: Tensor,
    ) -> Three:
        """Gradients of q, k and v."""
        window = self._config.window(layer_index)
        grads = []
        for stretch in self._stretches_of(window):
            rows = stretch.rows
            qkv = (q_THd[rows], k_TKd[rows], v_TKd[rows])
            grads.append(
                stretch.backward(dout_THd[rows], qkv, out_THd[rows], lse_HT[:, rows], window)
            )
        # Stretches cover all rows, in order, so their gradients only have to be put together.
        dqs, dks, dvs = zip(*grads, strict=True)
        return _joined(dqs), _joined(dks), _joined(dvs)

    def _stretches_of(self, window: int | None) -> list[Stretch]:
        if not self._ragged:
            self._ragged = self._stretches = ragged(self._lengths, self._stops, self._device)
            config = self._config
            heads = (config.num_heads, config.num_kv_heads, config.head_size)
            deterministic = torch.are_deterministic_algorithms_enabled()
            if not deterministic and cudnn_agrees(*heads, self._device):
                self._stretches = cut(self._lengths, self._device)
        return self._stretches if window is None else self._ragged


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


# ---------------------------------------------------------------------- the cut


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
        # A plan is made for lengths that will come again: those of a run, which are so by intent,
        # and those that are round, which filled-up sequences have too.
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


def ragged(lengths: Sequence[int], stops: Sequence[int], device: torch.device) -> list[Stretch]:
    """All for flash attention, piece by piece: its order of sums follows their number."""
    stretches: list[Stretch] = []
    left, start = iter(lengths), 0
    for stop in stops or [sum(lengths)]:
        own, at = list[int](), start
        while at < stop:
            own.append(next(left))
            at += own[-1]
        stretches.append(Ragged.of(start, own, device))
        start = stop
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

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse_HT: Tensor, window: int | None
    ) -> Three:
        packed, state = _flash_state(*(t.shape[1] for t in qkv[:2]), dout.shape[2], dout.device)
        lse = lse_HT.contiguous() if packed else self._padded(lse_HT)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, *qkv, out, lse, self.bounds, self.bounds, self.longest, self.longest, 0.0, True,
            *state, **_options(qkv, window),
        )  # fmt: skip
        return dq, dk, dv

    def _padded(self, lse_HT: Tensor) -> Tensor:
        """[B, H, S], as older versions of torch have it."""
        edges = self.bounds.tolist()
        rows = [lse_HT[:, a:b] for a, b in pairwise(edges)]
        return torch.stack([F.pad(row, (0, self.longest - row.shape[1])) for row in rows])


@lru_cache(maxsize=64)
def _flash_state(
    heads: int, kv_heads: int, head_size: int, device: torch.device
) -> tuple[bool, tuple[Tensor, ...]]:
    """(whether log-sums are packed, [H, T]; the state of the dropout that nobody asked for)."""
    q, k = (
        torch.zeros(5, n, head_size, device=device, dtype=torch.bfloat16) for n in (heads, kv_heads)
    )
    bounds = send(np.array([0, 3, 5], np.int32), device)
    _, lse, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, k, bounds, bounds, 3, 3, 0.0, True, False, scale=1.0
    )
    return lse.dim() == 2, tuple(state)


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

    def backward(
        self, dout: Tensor, qkv: Three, out: Tensor, lse_HT: Tensor, window: int | None
    ) -> Three:
        assert window is None
        dims, bounds, rng = _cudnn_state(*(t.shape[1] for t in qkv[:2]), dout.shape[2], dout.device)
        lse = self._boxed(lse_HT.t()[:, :, None]).contiguous()
        length = lse.shape[2]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *map(self._boxed, (dout, *qkv, out)), lse if dims == 4 else lse.squeeze(3), *rng, None,
            *bounds, length, length, 0.0, True, **_options(qkv, None),
        )  # fmt: skip
        return self._flat(dq), self._flat(dk), self._flat(dv)

    def _boxed(self, rows: Tensor) -> Tensor:
        if self.count == 1 and (missing := rounded(self.length) - self.length):
            rows = F.pad(rows, (0, 0, 0, 0, 0, missing))
        return rows.view(self.count, -1, *rows.shape[1:]).transpose(1, 2)

    def _flat(self, boxed_BHSd: Tensor) -> Tensor:
        return boxed_BHSd.transpose(1, 2).flatten(0, 1)[: self.count * self.length]


Stretch = Ragged | Rectangle
"""Neighbouring sequences of a batch and the kernel that serves them."""


@lru_cache(maxsize=64)
def _cudnn_state(
    heads: int, kv_heads: int, head_size: int, device: torch.device
) -> tuple[int, tuple[Any, Any], tuple[Tensor, Tensor]]:
    """(dimensions of its log-sums, bounds and dropout's state, which rectangles do not use)."""
    q, k = (
        torch.zeros(1, n, 64, head_size, device=device, dtype=torch.bfloat16)
        for n in (heads, kv_heads)
    )
    _, lse, bounds_q, bounds_k, _, _, seed, offset, _ = (
        torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, k, None, True, 0.0, True, False, scale=1.0
        )
    )
    return lse.dim(), (bounds_q, bounds_k), (seed, offset)


@lru_cache(maxsize=64)
def cudnn_agrees(heads: int, kv_heads: int, head_size: int, device: torch.device) -> bool:
    """Whether cuDNN's backward runs here for such heads and gives flash attention's answers."""
    generator = torch.Generator(device).manual_seed(0)
    count, length = 2, 192
    lengths = [length] * count
    q, k, v, dout = (
        torch.randn(
            count * length, n, head_size, generator=generator, device=device, dtype=torch.bfloat16
        )
        for n in (heads, kv_heads, kv_heads, heads)
    )
    out, lse = attention.tiles(
        q, k, v, attention.Queries.of(lengths, lengths, device), scale=head_size**-0.5,
        with_lse=True,
    )  # fmt: skip
    answers = []
    for stretch in (Ragged.of(0, lengths, device), Rectangle(0, count, length)):
        try:
            answers.append(stretch.backward(dout, (q, k, v), out, lse, None))
        except RuntimeError:
            return False
    # Two per cent: both round to bf16 on their way, but a wrong mask or layout is off by far more.
    return all(
        torch.linalg.vector_norm((a - b).float()) < 0.02 * torch.linalg.vector_norm(a.float())
        for a, b in zip(*answers, strict=True)
    )

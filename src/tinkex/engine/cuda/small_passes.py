"""Small training passes, replayed as CUDA graphs.

A pass of a few dozen tokens is two thousand launches and ten milliseconds of work: the host is what
takes its time. So when such a pass of one adapter comes a second time, it is recorded, forward and
backward, and replayed from then on. A recording has room for up to so many tokens and sequences;
rows that are not used form a sequence of their own whose gradient is zero. Nothing else changes:
the kernels are the same, and no bit of theirs depends on the number of rows (see `product`).

Weights and gradients lie in places of the recording's own: the adapter's are copied in and out.
Losses are not known here; the head is the scorer's.

Letters: T tokens, P parameters of an adapter, D hidden size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import attention
from tinkex.engine.cuda.adapter_operand import BatchOperands, low_precision_flat
from tinkex.engine.cuda.flash import PackedFlash
from tinkex.engine.cuda.transfer import send
from tinkex.engine.lora.adapter import Adapter, LoraBatch

if TYPE_CHECKING:
    from tinkex.engine.cuda.fused import CudaDecoder

_SIZES = (64, 128, 256, 512)
"""Tokens of a recording."""
_SEQUENCES = 16
"""Sequences of a pass; one is that of the unused rows, one has no tokens."""
_MOST = 4
"""Recordings kept, each with a copy of an adapter and its gradient."""
_SPARE = 4
"""A recording is made while the card has this many times its memory free."""


class SmallPasses:
    """The recordings of one decoder."""

    def __init__(self, decoder: CudaDecoder) -> None:
        self._decoder = decoder
        self._known: OrderedDict[Any, Recording] = OrderedDict()
        self._met: Counter[Any] = Counter()
        self._pool: Any = None

    def find(self, num_tokens: int, lengths: Sequence[int], lora: LoraBatch) -> Recording | None:
        """A recording that this pass fits, with its adapter in place; None: run it plainly."""
        size = next((size for size in _SIZES if size >= num_tokens), None)
        # A recording has one adapter in place, so a pass of several is run plainly.
        whole = len(lora.spans) == 1 and lora.spans[0].stop - lora.spans[0].start == num_tokens
        if size is None or not whole or len(lengths) + 2 > _SEQUENCES:
            return None
        adapter = lora.spans[0].adapter
        key = (size, adapter.signature)
        if (found := self._known.get(key)) is None:
            self._met[key] += 1
            # A pass that comes once would not earn back the time of its recording.
            if self._met[key] < 2 or not self._has_room(size, adapter):
                return None
            found = self._known[key] = Recording(self._decoder, adapter, size, self._pool)
            self._pool = found.pool
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        found.use(adapter)
        return found

    def _has_room(self, size: int, adapter: Adapter) -> bool:
        config = self._decoder.config
        row = 2 * (4 * config.hidden_size + 3 * config.mlp_size)
        # Six bytes a number of the adapter: a copy in bf16 and a gradient in fp32.
        needed = size * config.num_layers * row + 6 * adapter.flat.numel()
        return torch.cuda.mem_get_info(self._decoder.device)[0] > _SPARE * needed


class Recording:
    """A recorded pass of one size and one layout of adapters. `forward`, then `backward`."""

    def __init__(self, decoder: CudaDecoder, like: Adapter, size: int, pool: Any) -> None:
        device, self.size = decoder.device, size
        self._decoder, self._adapter, self._used = decoder, like, size
        self.inputs_2T = torch.zeros(2, size, dtype=torch.long, device=device)
        self.flat_1P = low_precision_flat(like, decoder.dtype).clone()[None]
        self.grad_1P = torch.zeros_like(like.flat)[None]
        lengths = [size] + [0] * (_SEQUENCES - 1)
        first = attention.Queries.of(lengths, lengths, device)
        tiles_X2 = torch.zeros(
            -(-size // first.rows) + _SEQUENCES, 2, dtype=torch.int32, device=device
        )
        bounds = first.bounds_q
        self._queries = attention.Queries(bounds, bounds, tiles_X2, first.rows)
        self._set_tiles(first.tiles_X2)
        self._lora = BatchOperands.fixed(like, self.flat_1P, self.grad_1P, size)
        self.dhidden_TD = torch.zeros(
            size, decoder.config.hidden_size, dtype=decoder.dtype, device=device
        )
        self._record(pool)

    def use(self, adapter: Adapter) -> None:
        """Take another adapter of the same layout, or this one as it is now."""
        self._adapter = adapter
        self.flat_1P[0].copy_(low_precision_flat(adapter, self._decoder.dtype))

    def fill(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> None:
        device, unused = self.inputs_2T.device, self.size - len(tokens_T)
        self._used = len(tokens_T)
        self.inputs_2T[0, : self._used] = tokens_T
        self.inputs_2T[1, : self._used] = positions_T
        self.inputs_2T[1, self._used :] = torch.arange(unused, device=device)
        # Unused rows are a sequence too: rows that no tile writes would hold anything, and in sums
        # over all rows 0 times no number is no number.
        filled = [*lengths, unused]
        filled += [0] * (_SEQUENCES - len(filled))
        queries = attention.Queries.of(filled, filled, device)
        self._queries.bounds_q.copy_(queries.bounds_q)
        self._set_tiles(queries.tiles_X2)

    def _set_tiles(self, tiles_X2: Tensor) -> None:
        """Write the tiles; unused ones stand at the start of a sequence without tokens."""
        device, count = tiles_X2.device, len(tiles_X2)
        self._queries.tiles_X2[:count] = tiles_X2
        self._queries.tiles_X2[count:] = send(np.array([_SEQUENCES - 1, 0], np.int32), device)

    def forward(self) -> Tensor:
        self._forward.replay()
        # A copy: the next replay writes there, perhaps before autograd is done with this one.
        return self._hidden_TD[: self._used].clone()

    def backward(self, dhidden_TD: Tensor) -> None:
        self.dhidden_TD[: self._used] = dhidden_TD
        self.dhidden_TD[self._used :] = 0
        self._backward.replay()
        # The recording's own gradient begins at zero in each replay; the adapter's goes on.
        self._adapter.start_grad()
        assert self._adapter.grad is not None
        self._adapter.grad.add_(self.grad_1P[0])

    def _record(self, pool: Any) -> None:
        from tinkex.engine.cuda.fused import FusedPass

        decoder, config = self._decoder, self._decoder.config
        flash = PackedFlash.fixed(self._queries, self.size, config)

        def forward() -> tuple[FusedPass, Tensor]:
            stream = decoder.stream(self.inputs_2T[1], flash, self._lora, trains=True)
            one = FusedPass(decoder, stream, self._lora)
            return one, one.forward(self.inputs_2T[0])

        def backward(one: FusedPass) -> None:
            self.grad_1P.zero_()
            one.backward(self.dhidden_TD)

        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # first runs compile kernels and choose algorithms
                for _ in range(2):
                    backward(forward()[0])
            torch.cuda.current_stream().wait_stream(side)
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._forward, pool=pool):
                one, self._hidden_TD = forward()
            self.pool = pool or self._forward.pool()
            # One pool for both: the backward reads what the forward kept.
            with torch.cuda.graph(self._backward, pool=self.pool):
                backward(one)

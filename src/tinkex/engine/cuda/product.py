"""Matrix products whose rows do not depend on their company.

The sampler computes a token among a few others, the trainer among thousands. Their logprobs agree
to the bit because every kernel here follows these rules, and a new one must too:

- A row's result is a function of the row (and, in attention, of the keys before it): no sum runs
  over rows, and no sum's order depends on how many rows there are.
- A product walks its summed dimension in order, from the first input to the last, into one fp32
  accumulator (`tl.dot(a, b, acc)`). Tiles may then have any shape: the tensor cores give the same
  bits for all of them. Never split that dimension over programs, unless the split is a part of the
  definition and the same everywhere (`lora_kernels`).
- Sums of anything else go through a product with ones, or through one kernel with one layout that
  both sides launch: `tl.sum` adds in an order that follows the tile.
- Kernels that must agree are launched with `enable_fp_fusion=False`: else the compiler contracts
  a * b + c in one of them and not in the other.
- A row is rounded where the definition says, however the work is fused.

cuBLAS is faster than our kernel and, as long as it does not split the summed dimension, gives the
same bits. Whether it does is not assumed: `product` compares the two when it first meets a shape
and a number of rows, and uses ours where a bit differs.

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda import early

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

_MANY = 512
"""From so many rows on, the check compares some of them on the caller's own numbers."""
_CHECKED = 128
"""Rows that it compares: one of each tile of a product of 16,384 rows."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How much of the output one program computes. No bit depends on it."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    copied: bool = False
    """Whether the card's copy engine fetches the operands (Hopper): see `_by_copies`."""


def tile_for(num_rows: int, num_out: int, device: torch.device, *, copied: bool = False) -> Tile:
    """Few rows must still be work for most multiprocessors. Measured on an H200.

    `copied`: whether the operands may be fetched so, on a card that can.
    """
    if num_rows <= 256 and num_out < 6144 and copied and _can_copy(device):
        sizes = [(32, 256, 5), (64, 128, 6), (128, 128, 5), (256, 128, 4)]
        most, inputs, stages = next(size for size in sizes if num_rows <= size[0])
        return Tile(most // 2, 64, inputs, 4, stages, copied=True)
    if num_rows <= 16:
        return Tile(16, 32, 256, 4, 4) if num_out < 8192 else Tile(16, 64, 128, 4, 5)
    if num_rows <= 64:
        return Tile(64, 32, 128, 4, 4) if num_out < 6144 else Tile(64, 64, 128, 4, 4)
    if num_rows <= 128 and num_out < 6144:
        return Tile(64, 64, 128, 4, 4)
    large = shared_memory(device) >= 160 << 10
    if num_rows <= 256 and num_out < 6144 and large:
        return Tile(64, 128, 128, 4, 4)
    if num_rows <= 256:
        return Tile(128, 64, 64, 4, 4) if num_out < 16384 else Tile(128, 128, 64, 8, 4)
    if num_out % 256 == 0 and large:
        return Tile(128, 256, 64, 8, 3)
    return Tile(128, 128, 64, 8, 3)


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes of fast memory that one program may have: 227 KiB on an H200, 99 on many cards."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=16)
def _can_copy(device: torch.device) -> bool:
    """Whether whole tiles can be fetched by descriptors: on Hopper, and in the interpreter."""
    if TensorDescriptor is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """A descriptor by which a kernel fetches tiles of so many rows and columns; see `_can_copy`."""
    assert TensorDescriptor is not None
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit(do_not_specialize=["T"])
def _product(
    x, w, bias, y, T, num_out, num_in,
    BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BM rows times BO outputs, over all inputs in order."""
    # Programs that run at one time should share inputs and weights in the card's cache: GROUP
    # blocks of rows take turns for each block of outputs.
    program, num_o = tl.program_id(0), tl.cdiv(num_out, BO)
    num_m = tl.num_programs(0) // num_o
    first_m = program // (GROUP * num_o) * GROUP
    members = tl.minimum(num_m - first_m, GROUP)
    m = first_m + program % (GROUP * num_o) % members
    n = program % (GROUP * num_o) // members
    early.wait(EARLY)
    rows = (m * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (n * BO + tl.arange(0, BO)).to(tl.int64)
    # Rows and columns past the end are computed from real ones and thrown away: loads without masks
    # are faster, and a tile's rows do not mix.
    at_x = x + tl.minimum(rows, T - 1)[:, None] * num_in
    at_w = w + tl.minimum(columns, num_out - 1)[None, :] * num_in
    acc = tl.zeros((BM, BO), tl.float32)
    for start in range(0, num_in, BK):
        i = start + tl.arange(0, BK)
        real = (i < num_in) | EVEN
        if FEW:  # one row read sixteen times is slow
            xv = tl.load(at_x + i[None, :], real[None, :] & (rows < T)[:, None], other=0.0)
        elif EVEN:
            xv = tl.load(at_x + i[None, :])
        else:
            xv = tl.load(at_x + i[None, :], real[None, :], other=0.0)
        if EVEN:
            wv = tl.load(at_w + i[:, None])
        else:
            wv = tl.load(at_w + i[:, None], real[:, None], other=0.0)
        # Into the accumulator itself: sums of BK inputs that are added afterwards would be rounded
        # otherwise, and bits would follow BK.
        acc = tl.dot(xv, wv, acc)
    if HAS_BIAS:  # in fp32, before the one rounding
        acc += tl.load(bias + columns, columns < num_out, other=0.0).to(tl.float32)[None, :]
    to = y + rows[:, None] * num_out + columns[None, :]
    tl.store(to, acc, (rows < T)[:, None] & (columns < num_out)[None, :])


@triton.jit
def _by_copies(
    x, w, y, num_m, num_in,
    BM: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same where whole tiles are fetched and stored at once, through descriptors.

    Threads that compute no addresses leave room for one tile more on its way, and weights are the
    operand of which a tensor core takes 64 at least, so few rows waste none of it: 12,288 inputs
    times 4,096 outputs take 27, 29 and 33 us for 32, 64 and 128 rows instead of 37, 36 and 38
    (H200, `dev/LOG.md`).
    """
    # Descriptors give zeros past the end and drop what is stored there: no masks. Programs that
    # share a block of weights are neighbours.
    row, column = tl.program_id(0) % num_m * BM, tl.program_id(0) // num_m * BO
    acc = tl.zeros((BO, BM), tl.float32)
    early.wait(EARLY)
    for start in range(0, num_in, BK):
        acc = tl.dot(w.load([column, start]), x.load([row, start]).T, acc)
    y.store([row, column], acc.T.to(y.dtype))


def sequential(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + bias by our own kernel, rounded once to `dtype` (that of x by default)."""
    (T, num_in), num_out = x_TI.shape, len(weight_OI)
    y_TO = torch.empty(T, num_out, device=x_TI.device, dtype=dtype or x_TI.dtype)
    x_TI, weight_OI = x_TI.contiguous(), weight_OI.contiguous()
    # The copy engine wants rows that start at multiples of 16 bytes.
    aligned = bias_O is None and num_in % 8 == 0 and num_out % 8 == 0
    aligned &= x_TI.data_ptr() % 16 == 0 and weight_OI.data_ptr() % 16 == 0
    tile = tile or tile_for(T, num_out, x_TI.device, copied=aligned)
    num_blocks = triton.cdiv(T, tile.rows)
    grid = (num_blocks * triton.cdiv(num_out, tile.outputs),)
    if tile.copied and num_blocks:
        _by_copies[grid](
            _descriptor(x_TI, tile.rows, tile.inputs),
            _descriptor(weight_OI, tile.outputs, tile.inputs),
            _descriptor(y_TO, tile.rows, tile.outputs),
            num_blocks, num_in, BM=tile.rows, BO=tile.outputs, BK=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
            **early.launch(T, x_TI.device),
        )  # fmt: skip
    elif num_blocks:
        _product[grid](
            x_TI, weight_OI, bias_O, y_TO, T, num_out, num_in,
            BM=tile.rows, BO=tile.outputs, BK=tile.inputs, GROUP=8, HAS_BIAS=bias_O is not None,
            EVEN=num_in % tile.inputs == 0, FEW=T < tile.rows,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
            **early.launch(T, x_TI.device),
        )  # fmt: skip
    return y_TO


# ---------------------------------------------------------------------- the faster of the two

_Key = tuple[int, int, bool, int, bool, torch.dtype, torch.device]
_EQUAL: dict[_Key, bool] = {}
"""By outputs, inputs, whether the matrix lies so, rows, bias, type of the result and device:
whether cuBLAS may be used."""


def product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x W^T + bias with fp32 sums in one order, rounded once to `dtype` (that of x by default)."""
    dtype = dtype or x_TI.dtype
    num_out, num_in = weight_OI.shape
    straight = weight_OI.is_contiguous()
    key = (num_out, num_in, straight, len(x_TI), bias_O is not None, dtype, x_TI.device)
    equal = _EQUAL.get(key)
    if equal is None:
        if x_TI.is_cuda and torch.cuda.is_current_stream_capturing():
            # A recording cannot look at numbers; ours is always right.
            return sequential(x_TI, weight_OI, bias_O, dtype)
        equal = _EQUAL[key] = agrees(x_TI, weight_OI, bias_O, dtype)
    if equal:
        return library(x_TI, weight_OI, bias_O, dtype)
    return sequential(x_TI, weight_OI, bias_O, dtype)


def library(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The same by cuBLAS, in whatever order it likes."""
    if dtype is None or dtype == x_TI.dtype:
        return F.linear(x_TI, weight_OI, bias_O)
    y_TO = torch.mm(x_TI, weight_OI.t(), out_dtype=dtype)
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def agrees(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype | None
) -> bool:
    """Whether cuBLAS gives the sequential bits for so many rows; waits for the device."""
    if not (num_rows := len(x_TI)):
        return True
    if num_rows < _MANY:
        # Such rows may be empty places of a recorded step, all zeros, which any order sums alike.
        generator = torch.Generator(x_TI.device).manual_seed(num_rows)
        x_TI = torch.randn(
            x_TI.shape, generator=generator, device=x_TI.device, dtype=torch.float32
        ).to(x_TI.dtype)
    try:
        theirs = library(x_TI, weight_OI, bias_O, dtype)
    except RuntimeError:
        return False
    step = max(1, num_rows // _CHECKED) if num_rows >= _MANY else 1
    ours = sequential(x_TI[::step].contiguous(), weight_OI, bias_O, dtype)
    # All zeros would agree whatever the order: that proves nothing, so it is not noted as equal.
    return bool(torch.equal(theirs[::step], ours)) and bool(ours.count_nonzero())

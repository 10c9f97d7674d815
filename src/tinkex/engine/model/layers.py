"""The differentiable pieces of a decoder layer, with hand-written backward passes.

The base is frozen, so no weight gradient of a base matrix is ever formed, and each piece saves only
what cannot be recomputed cheaply: the norm and the activation in front of a matmul are redone in
the backward pass instead of being kept. Without autograd the same functions run with no
bookkeeping, so trainer and sampler share their arithmetic to the bit.

Shapes: T rows of the packed stream, I inputs and O outputs of a linear, F MLP size, n heads of
size d, h half a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.lora.adapter import LoraTerm, add_low_rank, low_rank_backward
from tinkex.engine.model import packed_weights
from tinkex.engine.numerics.mxfp4 import Matrix, expanded
from tinkex.engine.numerics.row_filling import filled


def _apply(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


def _flat(terms: Sequence[LoraTerm]) -> list[Tensor]:
    return [tensor for term in terms for tensor in term.group.tensors()]


# ---------------------------------------------------------------------------------------- norm


def wide(x: Tensor) -> Tensor:
    """At least fp32: reductions are never done in less, and never in less than the model has."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension; reductions in fp32."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _apply(_RmsNorm, x, weight, eps)
    return _normalize(x, weight, _inverse_rms(x, eps))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    # Three small kernels instead of square, mean (which is two) and add: a decode step on a CPU has
    # sixty of these, each after a stream of weights has emptied the processor's cache.
    norm = torch.linalg.vector_norm(wide(x), dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def _normalize(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    return (wide(x) * inverse).to(x.dtype).mul_(weight)


def _norm_backward(dn: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    unit = wide(x) * inverse
    # y = unit * weight, so dx = (g - unit * mean(g * unit)) / rms; the weight is frozen.
    g = wide(dn) * weight
    inner = (g * unit).mean(-1, keepdim=True)
    return g.sub_(unit.mul_(inner)).mul_(inverse).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return _normalize(x, weight, inverse)

    @staticmethod
    def backward(ctx: Any, dn: Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        return _norm_backward(dn, x, weight, inverse), None, None


# -------------------------------------------------------------------------------- fused linears


def _affine(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if (y_TO := packed_weights.product(x_TI, weight_OI, bias_O)) is not None:
        return y_TO
    many = filled(x_TI)
    y_TO = many @ weight_OI.t() if bias_O is None else torch.addmm(bias_O, many, weight_OI.t())
    return y_TO if many is x_TI else y_TO[: len(x_TI)].clone()


def _linear_backward(
    ctx: Any,
    dy_TO: Tensor,
    x_TI: Tensor,
    weight_OI: Tensor,
    scaled: Sequence[Tensor],
    need_dx: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    dx_TI = dy_TO @ weight_OI if need_dx else None
    return dx_TI, low_rank_backward(dy_TO, x_TI, dx_TI, ctx.terms, scaled)


def norm_linear(
    x_TI: Tensor,
    norm_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    terms: Sequence[LoraTerm],
) -> Tensor:
    """Norm, then a linear with LoRA."""
    if torch.is_grad_enabled() and (terms or x_TI.requires_grad):
        return _apply(_NormLinear, x_TI, norm_I, eps, weight_OI, bias_O, terms, *_flat(terms))
    n_TI = _normalize(x_TI, norm_I, _inverse_rms(x_TI, eps))
    y_TO = _affine(n_TI, weight_OI, bias_O)
    add_low_rank(y_TO, n_TI, terms)
    return y_TO


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        norm_I: Tensor,
        eps: float,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        terms: Sequence[LoraTerm],
        *_: Tensor,
    ) -> Tensor:
        inverse = _inverse_rms(x_TI, eps)
        n_TI = _normalize(x_TI, norm_I, inverse)
        y_TO = _affine(n_TI, weight_OI, bias_O)
        scaled = add_low_rank(y_TO, n_TI, terms)
        ctx.terms = terms
        ctx.save_for_backward(x_TI, norm_I, inverse, weight_OI, *scaled)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> Any:
        x_TI, norm_I, inverse, weight_OI, *scaled = ctx.saved_tensors
        need_dx = ctx.needs_input_grad[0]
        n_TI = _normalize(x_TI, norm_I, inverse)
        dn_TI, grads = _linear_backward(ctx, dy_TO, n_TI, weight_OI, scaled, need_dx)
        dx_TI = None if dn_TI is None else _norm_backward(dn_TI, x_TI, norm_I, inverse)
        return dx_TI, None, None, None, None, None, *grads


def linear(
    x_TI: Tensor,
    weight_OI: Matrix,
    bias_O: Tensor | None,
    terms: Sequence[LoraTerm],
    residual_TO: Tensor | None = None,
    add_in_product: bool = False,
) -> Tensor:
    """A linear with LoRA, added to `residual_TO` when one is given; see `Ops.adds_in_product`.

    A packed weight is expanded for the product, and once more for its backward.
    """
    if torch.is_grad_enabled() and (terms or x_TI.requires_grad):
        residual = (residual_TO, add_in_product)
        return _apply(_Linear, x_TI, weight_OI, bias_O, *residual, terms, *_flat(terms))
    weight_OI = expanded(weight_OI)
    return _plain_linear(x_TI, weight_OI, bias_O, residual_TO, add_in_product, terms)[0]


def _plain_linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    add_in_product: bool,
    terms: Sequence[LoraTerm],
) -> tuple[Tensor, list[Tensor]]:
    if residual_TO is not None and add_in_product:
        y_TO = torch.addmm(residual_TO, x_TI, weight_OI.t())  # the sum is rounded to bf16 once
        if bias_O is not None:
            y_TO += bias_O
    else:
        y_TO = _affine(x_TI, weight_OI, bias_O)
        if residual_TO is not None:
            y_TO += residual_TO  # last: terms summed onto a large residual lose their low bits
    return y_TO, add_low_rank(y_TO, x_TI, terms)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Matrix,
        bias_O: Tensor | None,
        residual_TO: Tensor | None,
        add_in_product: bool,
        terms: Sequence[LoraTerm],
        *_: Tensor,
    ) -> Tensor:
        y_TO, scaled = _plain_linear(
            x_TI, expanded(weight_OI), bias_O, residual_TO, add_in_product, terms
        )
        ctx.terms, ctx.weight = terms, weight_OI  # frozen, so no version of it need be watched
        ctx.save_for_backward(x_TI, *scaled)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> Any:
        x_TI, *scaled = ctx.saved_tensors
        need_dx, need_residual = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        weight_OI = expanded(ctx.weight)
        dx_TI, grads = _linear_backward(ctx, dy_TO, x_TI, weight_OI, scaled, need_dx)
        return dx_TI, None, None, dy_TO if need_residual else None, None, None, *grads


def glu_linear(
    gate_up_TF: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    terms: Sequence[LoraTerm],
    residual_TO: Tensor | None = None,
    add_in_product: bool = False,
) -> Tensor:
    """silu(gate) * up, then `linear`."""
    if torch.is_grad_enabled() and (terms or gate_up_TF.requires_grad):
        residual = (residual_TO, add_in_product)
        return _apply(_GluLinear, gate_up_TF, weight_OI, bias_O, *residual, terms, *_flat(terms))
    act_TI = _activate(gate_up_TF)
    return _plain_linear(act_TI, weight_OI, bias_O, residual_TO, add_in_product, terms)[0]


def _activate(gate_up_TF: Tensor) -> Tensor:
    # SwiGLU (Shazeer, arXiv 2002.05202).
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class _GluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up_TF: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        residual_TO: Tensor | None,
        add_in_product: bool,
        terms: Sequence[LoraTerm],
        *_: Tensor,
    ) -> Tensor:
        act_TI = _activate(gate_up_TF)
        y_TO, scaled = _plain_linear(act_TI, weight_OI, bias_O, residual_TO, add_in_product, terms)
        ctx.terms = terms
        ctx.save_for_backward(gate_up_TF, weight_OI, *scaled)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> Any:
        gate_up_TF, weight_OI, *scaled = ctx.saved_tensors
        need_dx, need_residual = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        gate, up = gate_up_TF.chunk(2, dim=-1)
        silu = F.silu(gate)
        d_act, grads = _linear_backward(ctx, dy_TO, silu * up, weight_OI, scaled, need_dx)
        d_gate_up = None
        if d_act is not None:
            d_gate_up = torch.empty_like(gate_up_TF)
            d_gate, d_up = d_gate_up.chunk(2, dim=-1)
            torch.mul(d_act, silu, out=d_up)
            d_gate.copy_(torch.ops.aten.silu_backward(d_act.mul_(up), gate))
        return d_gate_up, None, None, dy_TO if need_residual else None, None, None, *grads


# ---------------------------------------------------------------------------------------- rope


def rotate(x_T: Tensor, num_heads: int, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Rotate the first `num_heads` heads of each row by its position, in place.

    `x_T` is [T, heads * d] or [T, heads, d] and no view of another tensor (autograd would have to
    rewrite its base); `cos_Th` and `sin_Th` hold half a head. Where they hold less and `x_T` is
    [T, heads, d], only that part of each head is rotated.
    """
    if torch.is_grad_enabled() and x_T.requires_grad:
        return _apply(_Rotate, x_T, num_heads, cos_Th, sin_Th)
    return _rotate_inplace(x_T, num_heads, cos_Th, sin_Th)


def _rotate_inplace(x_T: Tensor, num_heads: int, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    num_rows, half = cos_Th.shape
    heads_Tnd = x_T if x_T.ndim == 3 else x_T.view(num_rows, -1, 2 * half)
    # Halves of a head form the pairs, as in Hugging Face; RoFormer (arXiv 2104.09864) pairs
    # neighbours.
    left, right = heads_Tnd[:, :num_heads, : 2 * half].chunk(2, dim=-1)
    cos, sin = cos_Th.unsqueeze(1), sin_Th.unsqueeze(1)
    turned = left * sin
    left.mul_(cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).add_(turned)
    return x_T


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, num_heads: int, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
        ctx.mark_dirty(x_T)
        ctx.num_heads = num_heads
        ctx.save_for_backward(cos_Th, sin_Th)
        return _rotate_inplace(x_T, num_heads, cos_Th, sin_Th)

    @staticmethod
    def backward(ctx: Any, dy_T: Tensor) -> Any:
        cos_Th, sin_Th = ctx.saved_tensors
        dy_T = dy_T.clone(memory_format=torch.contiguous_format)
        # A rotation is undone by its negative angle; autograd may still read `dy_T`.
        return _rotate_inplace(dy_T, ctx.num_heads, cos_Th, -sin_Th), None, None, None

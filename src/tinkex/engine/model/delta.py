"""The gated delta rule: a convolution, then a state per head that each token decays and corrects.

A state S [key, value] takes the place of keys and values. Token t turns it into
`S exp(g) + k (beta (v - k S exp(g)))` and reads `q S`, with q and k of unit length. `mix` does this
for many sequences of one length at once: a token alone takes one step, longer ones go in chunks, in
which all corrections are the solution of one triangular system. Where sequences begin and where
their states are kept is known to the caller only. Everything here is fp32; gradients come from
autograd. The step is the oracle of the chunks, and both of the kernels on CUDA.

Shapes: B sequences of L tokens, C channels of the convolution, W its width, K key heads, H value
heads, k and v their sizes, N chunks of c tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.layers import wide
from tinkex.engine.model.shape import DeltaConfig

CHUNK = 64
_UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a delta layer beside its two linears."""

    config: DeltaConfig
    conv_CW: Tensor
    decay_H: Tensor
    """-exp(A_log), fp32."""
    dt_bias_H: Tensor
    norm_v: Tensor
    order_X: Tensor | None = None
    """Where the columns of the fused linear are, by kind; None: they are in order."""

    def in_order(self, fused_TX: Tensor) -> Tensor:
        """Queries, keys, values, gate, strength, decay: each of all heads, one after the other."""
        return fused_TX if self.order_X is None else fused_TX.index_select(1, self.order_X)

    def gates(self, b_TH: Tensor, a_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(log decay, strength of the correction) of each token and head, in fp32."""
        g_TH = self.decay_H * F.softplus(wide(a_TH) + self.dt_bias_H)
        return g_TH, wide(b_TH).sigmoid()


def by_kind(config: DeltaConfig) -> Tensor:
    """Where `DeltaWeights.in_order` finds its columns when linears go head by head."""
    heads, share = config.key_heads, config.value_heads // config.key_heads
    values = share * config.value_size
    wide_size = 2 * config.key_size + 2 * values
    qkvz = torch.arange(heads * wide_size).view(heads, wide_size)
    ba = torch.arange(heads * 2 * share).view(heads, 2 * share) + qkvz.numel()
    pieces = [
        *qkvz.split([config.key_size, config.key_size, values, values], 1),
        *ba.split(share, 1),
    ]
    return torch.cat([piece.flatten() for piece in pieces])


@dataclass(frozen=True, slots=True)
class DeltaState:
    """Where B sequences stand: the last inputs of the convolution, and a state per head."""

    conv_BwC: Tensor
    """The W - 1 tokens before, as they came from the linear."""
    heads_BHkv: Tensor


def no_state(config: DeltaConfig, count: int, like: Tensor) -> DeltaState:
    """Where a sequence begins."""
    heads = (count, config.value_heads, config.key_size, config.value_size)
    return DeltaState(
        like.new_zeros(count, config.conv_width - 1, config.channels),
        like.new_zeros(heads, dtype=torch.promote_types(like.dtype, torch.float32)),
    )


def mix(
    weights: DeltaWeights, x_BLC: Tensor, g_BLH: Tensor, beta_BLH: Tensor, state: DeltaState
) -> tuple[Tensor, DeltaState]:
    """Outputs [B, L, H, v] of sequences that stood at `state`, and where they stand now."""
    config = weights.config
    length = x_BLC.shape[1]
    inputs = torch.cat([state.conv_BwC, x_BLC], dim=1)
    mixed_BLC = _convolve(inputs, weights.conv_CW, length)
    q, k, v = mixed_BLC.split([config.keys, config.keys, config.values], dim=-1)
    q_BKLk, k_BKLk = (
        _unit(t.unflatten(-1, (config.key_heads, -1))).transpose(1, 2) for t in (q, k)
    )
    v_BHLv = v.unflatten(-1, (config.value_heads, -1)).transpose(1, 2)
    share = config.value_heads // config.key_heads
    q_BHLk = (q_BKLk * config.key_size**-0.5).repeat_interleave(share, dim=1)
    k_BHLk = k_BKLk.repeat_interleave(share, dim=1)
    rule = step if length == 1 else chunks
    g, beta = g_BLH.transpose(1, 2), beta_BLH.transpose(1, 2)
    out_BHLv, heads = rule(q_BHLk, k_BHLk, v_BHLv, g, beta, state.heads_BHkv)
    after = DeltaState(inputs[:, length:], heads)
    return out_BHLv.transpose(1, 2).to(x_BLC.dtype), after


def _convolve(inputs_BlC: Tensor, conv_CW: Tensor, length: int) -> Tensor:
    """A causal convolution of every channel by itself, then silu."""
    inputs_BlC, conv_CW = wide(inputs_BlC), wide(conv_CW)
    taps = conv_CW.unbind(1)
    mixed = inputs_BlC[:, :length] * taps[0]
    for at, tap in enumerate(taps[1:], 1):
        mixed = mixed + inputs_BlC[:, at : at + length] * tap
    return F.silu(mixed)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _UNIT_EPS)


def step(
    q_BHLk: Tensor, k_BHLk: Tensor, v_BHLv: Tensor, g_BHL: Tensor, beta_BHL: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, token by token."""
    outputs = []
    for t in range(q_BHLk.shape[2]):
        # Yang et al., Gated Delta Networks (arXiv 2412.06464).
        state = state * g_BHL[:, :, t, None, None].exp()
        k_BHk1 = k_BHLk[:, :, t, :, None]
        known_BHv = (state * k_BHk1).sum(-2)
        change_BHv = (v_BHLv[:, :, t] - known_BHv) * beta_BHL[:, :, t, None]
        state = state + k_BHk1 * change_BHv[:, :, None]
        outputs.append((state * q_BHLk[:, :, t, :, None]).sum(-2))
    return torch.stack(outputs, dim=2), state


def chunks(
    q_BHLk: Tensor, k_BHLk: Tensor, v_BHLv: Tensor, g_BHL: Tensor, beta_BHL: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in chunks: within one, token i sees what tokens j < i changed, decayed since j."""
    length = q_BHLk.shape[2]
    size = min(CHUNK, length)
    fill = -length % size
    # Filled tokens neither decay nor change the state.
    q, k, v = (_cut(F.pad(t, (0, 0, 0, fill)), size) for t in (q_BHLk, k_BHLk, v_BHLv))
    g, beta = (_cut(F.pad(t, (0, fill)), size) for t in (g_BHL, beta_BHL))
    # In float64: after one strong decay the differences of small ones would lose their digits.
    total_BHNc = g.double().cumsum(-1)
    apart = (total_BHNc[..., :, None] - total_BHNc[..., None, :]).to(g.dtype)
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay_BHNcc = apart.masked_fill(~seen, -torch.inf).exp()
    from_start = total_BHNc.to(g.dtype).exp()[..., None]
    to_end = (total_BHNc[..., -1:] - total_BHNc).to(g.dtype).exp()[..., None]
    # The WY form of a product of Householder-like updates (arXiv 2406.06484).
    kb, vb = k * beta[..., None], v * beta[..., None]
    system = (kb @ k.transpose(-1, -2)) * decay_BHNcc
    right = torch.cat([vb, kb * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = (q @ k.transpose(-1, -2)) * decay_BHNcc
    q, k = q * from_start, k * to_end
    outputs = []
    for n in range(q.shape[2]):
        change = new[:, :, n] - old[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + inside[:, :, n] @ change)
        state = state * from_start[:, :, n, -1:] + k[:, :, n].transpose(-1, -2) @ change
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length], state


def _cut(x_BHL: Tensor, size: int) -> Tensor:
    cut: Tensor = x_BHL.unflatten(2, (-1, size))
    return cut

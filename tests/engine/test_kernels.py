"""Each Triton kernel against the plain torch it replaces.

On CUDA the real kernels run; elsewhere Triton's interpreter runs the same source on the CPU
(`tests/conftest.py` switches it on). Triton exists for Linux only, so elsewhere these are skipped.
"""

import math
import sys

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("triton has no build for this system", allow_module_level=True)

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.cuda import (
    attention,
    draw_kernels,
    kernels,
    lora_kernels,
    optimizer_kernels,
    product,
)
from tinkex.engine.cuda.adapter_operand import BatchOperands, OwnGradients, StackGradients
from tinkex.engine.cuda.adapter_slots import AdapterSlots
from tinkex.engine.cuda.kernel_ops import KernelOps
from tinkex.engine.lora.adapter import (
    Adapter,
    AdapterSpan,
    LoraBatch,
    LoraGroup,
    LoraPart,
    TargetPart,
)
from tinkex.engine.numerics import picking
from tinkex.engine.numerics.ops import Ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def rms(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_add_rms_norm_and_its_gradient_match_autograd():
    x, delta, w, dy, dres = randn(5, 48), randn(5, 48), randn(48), randn(5, 48), randn(5, 48)
    total, y, rstd = kernels.add_rms_norm(x, delta, w, 1e-5)
    ref = (x + delta).requires_grad_()
    ref_y = rms(ref, w, 1e-5)
    torch.testing.assert_close(total, ref.detach())
    torch.testing.assert_close(y, ref_y.detach())
    ref_y.backward(dy)
    dx = kernels.rms_norm_backward_(dres.clone(), dy, total, w, rstd)
    torch.testing.assert_close(dx, dres + ref.grad)
    torch.testing.assert_close(kernels.rms_norm_again(total, w, rstd), y)


@pytest.mark.parametrize("normed", [True, False])
def test_rope_and_its_gradient_match_autograd(normed: bool):
    T, H, K, d = 4, 4, 2, 16
    qkv = randn(T, (H + 2 * K) * d).requires_grad_()
    angle = randn(T, d // 2)
    cos, sin = angle.cos(), angle.sin()
    norms = (randn(d), randn(d)) if normed else None
    q, k, v = kernels.rope(qkv.detach(), cos, sin, norms, 1e-6, heads=H, kv_heads=K)

    def turn(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        x = rms(x, w, 1e-6) if w is not None else x
        lo, hi = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([lo * c - hi * s, hi * c + lo * s], -1)

    q_ref, k_ref, v_ref = qkv.view(T, -1, d).split([H, K, K], 1)
    q_ref = turn(q_ref, norms and norms[0])
    k_ref = turn(k_ref, norms and norms[1])
    for ours, ref in ((q, q_ref), (k, k_ref), (v, v_ref)):
        torch.testing.assert_close(ours, ref.detach())
    grads = randn(T, H, d), randn(T, K, d), randn(T, K, d)
    torch.autograd.backward([q_ref, k_ref, v_ref], list(grads))
    ours = kernels.rope_backward(*grads, qkv.detach(), cos, sin, norms, 1e-6)
    torch.testing.assert_close(ours, qkv.grad)


def test_rope_writes_keys_and_values_to_their_slots():
    T, H, K, d, blocks, P = 3, 2, 1, 8, 2, 4
    qkv, cos, sin = randn(T, 4 * d), randn(T, d // 2), randn(T, d // 2)
    keys, values = torch.zeros(2, blocks, P, K, d, device=DEVICE)
    slots = torch.tensor([5, -1, 2], device=DEVICE)
    _, k, v = kernels.rope(qkv, cos, sin, None, 0.0, heads=H, kv_heads=K)
    kernels.rope(qkv, cos, sin, None, 0.0, heads=H, kv_heads=K, cache=(keys, values, slots))
    torch.testing.assert_close(keys.view(-1, K, d)[[5, 2]], k[[0, 2]])
    torch.testing.assert_close(values.view(-1, K, d)[[5, 2]], v[[0, 2]])
    assert keys.view(-1, K, d)[[0, 1, 3, 4, 6, 7]].abs().sum() == 0


def test_swiglu_and_its_gradient_match_autograd():
    gate_up, dy = randn(3, 20).requires_grad_(), randn(3, 10)
    gate, up = gate_up.chunk(2, -1)
    ref = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.swiglu(gate_up.detach()), ref.detach())
    ref.backward(dy)
    work = gate_up.detach().clone()
    torch.testing.assert_close(kernels.swiglu_backward_(dy, work), ref.detach())
    torch.testing.assert_close(work, gate_up.grad)


def test_the_log_total_and_the_gradient_of_a_logprob_match_autograd():
    logits, slopes = (randn(3, 5000) * 4).requires_grad_(), randn(3)
    targets = torch.tensor([0, 4999, 77], device=DEVICE)
    top, log_total = kernels.log_total(logits.detach())
    torch.testing.assert_close(top + log_total, logits.detach().logsumexp(-1))
    picked = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (picked * slopes).sum().backward()
    lse = top + log_total
    ours = kernels.logit_gradient(logits.detach(), lse, targets, slopes, torch.float32)
    torch.testing.assert_close(ours, logits.grad)


def test_a_row_less_its_largest_logit_has_the_same_log_total_to_the_bit():
    """The sampler shifts its logits before it draws, the trainer does not."""
    logits = randn(4, 4999) * 4
    top, log_total = kernels.log_total(logits)
    again = kernels.log_total(logits - top[:, None])
    assert torch.equal(again[0], torch.zeros_like(top))
    assert torch.equal(again[1], log_total)
    assert torch.equal(kernels.log_total(logits[1:2])[1], log_total[1:2])


# ---------------------------------------------------------------------- attention


def dense(q, k, v, window):
    """Attention of the last len(q) tokens of one sequence to all its keys, in float64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    place = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    seen = (key <= place) & (key > place - (window or 1 << 30))
    scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


@pytest.mark.parametrize("window", [None, 30, 300])
def test_tiles_of_queries_match_dense_attention(window: int | None):
    """Whole sequences, as in training, and the ends of longer ones, as in a prompt's chunks."""
    num_queries, num_keys, H, K, d = [300, 1, 140, 7], [300, 1, 700, 520], 4, 2, 16
    q, k, v = randn(sum(num_queries), H, d), randn(sum(num_keys), K, d), randn(sum(num_keys), K, d)
    queries = attention.Queries.of(num_queries, num_keys, torch.device(DEVICE))
    out, lse = attention.tiles(q, k, v, queries, scale=d**-0.5, window=window, with_lse=True)
    at_q = at_k = 0
    for nq, nk in zip(num_queries, num_keys, strict=True):
        rows, keys = slice(at_q, at_q + nq), slice(at_k, at_k + nk)
        at_q, at_k = rows.stop, keys.stop
        want, want_lse = dense(q[rows], k[keys], v[keys], window)
        torch.testing.assert_close(out[rows].double(), want, atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(lse[:, rows].double(), want_lse, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("splits", [1, 2, 64])
@pytest.mark.parametrize("window", [None, 30])
def test_paged_decode_matches_dense_attention(splits: int, window: int | None):
    B, H, K, d, P, width = 4, 4, 2, 16, 16, 40
    q = randn(B, H, d)
    keys, values = randn(2, B * width, P, K, d)
    lengths = torch.tensor([1, 77, 0, 630], device=DEVICE, dtype=torch.int32)
    tables = torch.randperm(B * width, device=DEVICE).view(B, width).to(torch.int32)
    out = attention.paged_decode(
        q, keys, values, tables, lengths, scale=d**-0.5, splits=splits, window=window
    )
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            assert out[b].abs().sum() == 0
            continue
        k, v = (cache[tables[b].long()].view(-1, K, d)[:length] for cache in (keys, values))
        want, _ = dense(q[b : b + 1], k, v, window)
        torch.testing.assert_close(out[b : b + 1].double(), want, atol=4e-3, rtol=4e-3)


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("shape", [(1, 40, 300), (70, 72, 33), (130, 16, 1100)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_s_product_is_right_and_does_not_depend_on_the_other_rows(shape, biased):
    rows, num_in, num_out = shape
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, w = randn(rows, num_in).to(kind), randn(num_out, num_in).to(kind)
    bias = randn(num_out).to(kind) if biased else None
    y = product.product(x, w, bias)
    expected = torch.nn.functional.linear(
        x.double(), w.double(), None if bias is None else bias.double()
    )
    assert (y - expected).norm() / expected.norm() < 4e-3
    for at in {0, rows // 2, rows - 1}:
        alone = product.product(x[at : at + 1], w, bias)[0]
        if DEVICE == "cuda":  # the interpreter's sums are numpy's
            assert torch.equal(alone, y[at])
        torch.testing.assert_close(alone, y[at])


def test_a_matrix_at_an_odd_address_is_multiplied_too():
    """Descriptors want 16 bytes; a tensor of a mapped file may lie anywhere."""
    x, flat = randn(20, 32), randn(64 * 32 + 1)
    w = flat[1:].view(64, 32)
    assert w.data_ptr() % 16
    y, want = product.sequential(x, w), x.double() @ w.double().t()
    assert (y - want).norm() / want.norm() < 4e-3


# ---------------------------------------------------------------------- draws


@pytest.mark.parametrize("cells", [1, 64, 4096, 5000, 9001])
def test_tokens_are_drawn_as_the_plain_version_draws_them(cells):
    """A rounding of exp moves a draw only where a number falls on the edge of two tokens."""
    rows = 12
    scaled = randn(rows, cells) * 6
    scaled -= scaled.amax(1, keepdim=True)
    scaled[1, cells // 2 :] = float("-inf")
    scaled[1, 0] = 0
    scaled[2] = float("-inf")
    scaled[2, cells - 1] = 0  # one token alone
    uniform = torch.rand(rows, 3, device=DEVICE, dtype=torch.float64)
    uniform[3], uniform[4] = 0, 1 - 2**-53
    picked, total = draw_kernels.pick(scaled, uniform, picking.ONE)
    expected, log_total = picking.pick(scaled, uniform)
    assert picked.tolist() == expected.tolist()
    torch.testing.assert_close(picking.log_weight(total), log_total)
    weights = picking.whole_weights(scaled)
    assert (weights.gather(1, picked[:, None]) > 0).all()


def test_rows_that_are_not_numbers_draw_a_token_that_exists():
    scaled = torch.full((2, 5000), float("nan"), device=DEVICE)
    picked, _ = draw_kernels.pick(scaled, torch.rand(2, 3, device=DEVICE), picking.ONE)
    assert ((picked >= 0) & (picked < 5000)).all()


# ---------------------------------------------------------------------- adapters in slots


def adapter(ranks: tuple[int, ...], seed: int) -> Adapter:
    """A linear of three modules over 40 inputs and 300 outputs, with random A and B."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    columns = ((0, 150), (150, 220), (220, 300))
    parts, row = [], 0
    for number, (rank, (start, stop)) in enumerate(zip(ranks, columns, strict=True)):
        target = TargetPart(f"m{number}", "attn", start, stop)
        parts.append(LoraPart(target, row, rank, 0.5 + number // 2))
        row += rank
    group = LoraGroup(
        random(row, 40),
        tuple(random(stop - start, r) for r, (start, stop) in zip(ranks, columns, strict=True)),
        tuple(parts),
    )
    return Adapter({"x": group}, trainable=False)


@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 20, 20), (200, 200, 200)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("places", [11, 200], ids=["few places", "many places"])
def test_adapters_in_slots_add_what_each_row_s_own_adapter_adds(ranks, count, places):
    adapters = [adapter(ranks, seed) for seed in range(count)]
    slots = AdapterSlots(adapters[0], 2 if count == 1 else 4, torch.float32, max_rows=256)
    owner = [0, None, 0, 0, None] if count == 1 else [2, None, 0, 1, 0, 2, None, 2]
    spans = [
        AdapterSpan(row, row + 1, adapters[at]) for row, at in enumerate(owner) if at is not None
    ]
    order = slots.place(LoraBatch(spans), len(owner), places)
    assert sorted(order) == list(range(len(owner)))
    x, y = randn(len(owner), 40), randn(len(owner), 300)
    expected = y.clone()
    for row, at in enumerate(owner):
        for part, a, b in adapters[at].modules() if at is not None else ():
            columns = slice(part.target.start, part.target.stop)
            expected[row, columns] += part.scale * (b @ (a @ x[row]))
    filled = [*order, *[order[0]] * (places - len(order))]
    for _ in range(2):  # the second call finds the counters as the first did
        sorted_y = y[filled].clone()
        operand, rows = slots.operands["x"], x[filled].contiguous()
        operand.add_(sorted_y, operand.start(rows))
        off = (sorted_y[: len(owner)] - expected[order]).norm() / expected.norm()
        assert off < 2e-3  # the GPU's fp32 products are TF32
        assert torch.equal(sorted_y[len(owner) :], y[filled[len(owner) :]])


# ---------------------------------------------------------------------- adapters on spans


@pytest.mark.parametrize("ranks", [(8, 8, 8), (4, 20, 20), (1, 3, 70)], ids=str)
def test_adapters_on_spans_add_to_outputs_and_to_the_gradients_of_inputs(ranks):
    spans = [(3, 140), (140, 141), (150, 300)]  # rows before, between and behind have no adapter
    adapters = [adapter(ranks if number else (5, 5, 5), number) for number in range(3)]
    batch = LoraBatch(AdapterSpan(*rows, a) for rows, a in zip(spans, adapters, strict=True))
    operand = BatchOperands(batch, 310, torch.float32).get("x")
    x, dy, y, dx = randn(310, 40), randn(310, 300), randn(310, 300), randn(310, 40)
    want_y, want_dx = y.clone(), dx.clone()
    for (start, stop), lora in zip(spans, adapters, strict=True):
        for part, a, b in lora.modules():
            columns = slice(part.target.start, part.target.stop)
            want_y[start:stop, columns] += part.scale * x[start:stop] @ a.t() @ b.t()
            want_dx[start:stop] += part.scale * dy[start:stop, columns] @ b @ a
    operand.add_(y, inner := operand.start(x))
    operand.backward_input_(dx, dy)
    assert [len(h) for h in inner] == [stop - start for start, stop in spans]
    for ours, want in ((y, want_y), (dx, want_dx)):
        assert (ours - want).norm() / want.norm() < 2e-3  # the GPU's fp32 products are TF32
        assert torch.equal(ours[:3], want[:3])
        assert torch.equal(ours[300:], want[300:])


@pytest.mark.parametrize("ranks", [(8, 8, 8), (16, 72, 72)], ids=str)
def test_gradients_of_several_adapters_go_to_their_own_buffers(ranks):
    """Each over its own rows, in fp32, beside what is there already."""
    lengths = [70, 1, 129]
    adapters, stops = [adapter(ranks, seed) for seed in range(3)], np.cumsum(lengths).tolist()
    spans = [AdapterSpan(b - n, b, a) for a, b, n in zip(adapters, stops, lengths, strict=True)]
    batch = BatchOperands(LoraBatch(spans), stops[-1], torch.float32)
    x, dy = randn(stops[-1], 40), randn(stops[-1], 300)
    h, dh = randn(stops[-1], sum(ranks)), randn(stops[-1], sum(ranks))
    grads = batch.grads("x")
    assert isinstance(grads[0], StackGradients)
    for _ in range(2):
        batch.get("x").gather(x, [h], dy, [dh], grads)
    for span in spans:
        rows, got = slice(span.start, span.stop), iter(span.adapter.views(span.adapter.grad))
        want = [dh[rows].double().t() @ x[rows].double()]
        for part in span.adapter.groups["x"].parts:
            outputs = dy[rows, part.target.start : part.target.stop].double().t()
            want.append(part.scale * outputs @ h[rows, part.row : part.row + part.rank].double())
        for expected in want:
            ours = next(got)
            assert (ours - 2 * expected).norm() / expected.norm() < 4e-3  # TF32 on the GPU


def test_an_adapter_on_two_spans_of_a_batch_gathers_both():
    """Two programs that add to one buffer at the same time would lose one of the sums."""
    one, other = adapter((8, 8, 8), 0), adapter((8, 8, 8), 1)
    spans = [AdapterSpan(0, 5, one), AdapterSpan(5, 9, other), AdapterSpan(9, 16, one)]
    grads = BatchOperands(LoraBatch(spans), 16, torch.float32).grads("x")
    assert [type(grad) for grad in grads] == [OwnGradients] * 3


@pytest.mark.parametrize("programs", [0, 1 << 30], ids=["walked", "shared out"])
def test_an_inner_product_has_the_same_bits_walked_by_one_program_or_by_many(programs, monkeypatch):
    kind = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, flat = randn(130, 5000).to(kind), randn(2, 7 + 40 * 5000).to(kind)
    blocks = [(1, 0, 64), (1, 64, 100), (0, 100, 130)]
    blocks_M3 = torch.tensor(blocks, device=DEVICE, dtype=torch.int32)
    want = lora_kernels.shrink_many(x, flat, blocks_M3, 7, 40)
    monkeypatch.setattr(lora_kernels, "_PROGRAMS", programs)
    ours = lora_kernels.shrink_many(x, flat, blocks_M3, 7, 40)
    if DEVICE == "cuda":  # the interpreter's sums are numpy's
        assert torch.equal(ours, want)
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-3)


# ---------------------------------------------------------------------- optimizers


def test_a_step_of_adamw_is_the_plain_one():
    size, params = 3000, AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
    ours = [randn(size), torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE)]
    weights = ours[0].clone().requires_grad_()
    plain = torch.optim.Adam([weights], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 4):
        weights.grad = randn(size)
        version = ours[0]._version
        optimizer_kernels.adamw_(*ours, weights.grad.clone(), step, params)
        assert ours[0]._version > version, "copies in low precision are made anew by it"
        plain.step()
        torch.testing.assert_close(ours[0], weights.detach())
    state = plain.state[weights]
    torch.testing.assert_close(ours[1], state["exp_avg"])
    torch.testing.assert_close(ours[2], state["exp_avg_sq"])


@pytest.mark.parametrize("size", [1, 5000, 20_000])
def test_a_norm_is_summed_in_float64(size, monkeypatch):
    monkeypatch.setattr(optimizer_kernels, "_PROGRAMS", 8)
    x = randn(size) * 1e-30  # whose squares are 0 in fp32
    assert optimizer_kernels.norm(x) == pytest.approx(float(x.double().norm()), rel=1e-12)
    x[size // 2] = float("nan")
    assert math.isnan(optimizer_kernels.norm(x))


# ---------------------------------------------------------------------- all of them, as one value


def test_the_operations_with_kernels_give_the_plain_ones_numbers(monkeypatch):
    monkeypatch.setattr(optimizer_kernels, "_PROGRAMS", 8)
    ours, plain = KernelOps(DEVICE), Ops(DEVICE)
    logits, slopes = randn(3, 5000) * 4, randn(3)
    targets = torch.tensor([0, 4999, 77], device=DEVICE)
    for mine, theirs in zip(ours.log_total(logits), plain.log_total(logits), strict=True):
        torch.testing.assert_close(mine, theirs)
    log_sum = sum(plain.log_total(logits))[:, 0]
    gradients = [ops.logit_gradient(logits, log_sum, targets, slopes) for ops in (ours, plain)]
    torch.testing.assert_close(gradients[0].float(), gradients[1], rtol=1e-2, atol=1e-2)
    scaled = logits.clone()
    torch.testing.assert_close(ours.subtract_top_(scaled), plain.log_total(logits)[1])
    assert plain.subtract_top_(logits) is None
    torch.testing.assert_close(scaled, logits)
    uniform = torch.rand(3, 3, device=DEVICE, dtype=torch.float64)
    assert ours.pick(scaled, uniform)[0].tolist() == plain.pick(scaled, uniform)[0].tolist()
    assert ours.norm(slopes) == pytest.approx(plain.norm(slopes))


def test_a_step_of_adamw_with_kernels_is_the_plain_one_to_rounding():
    params, gradient = AdamParams(learning_rate=0.01), randn(3000)
    start = [randn(3000), randn(3000) * 0.1, randn(3000).square()]
    after = []
    for ops in (KernelOps(DEVICE), Ops(DEVICE)):
        state = [tensor.clone() for tensor in start]
        ops.adamw_(*state, gradient.clone(), 7, params)
        after.append(state)
    for mine, theirs in zip(*after, strict=True):
        torch.testing.assert_close(mine, theirs)

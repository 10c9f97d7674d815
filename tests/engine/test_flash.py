"""How a packed batch is cut into groups, and that every cut gives attention's own answer."""

import pytest
import torch

from tinkex.engine.cuda import flash
from tinkex.engine.model.shape import ModelConfig, RopeConfig

MIXES = {
    "one length": [512] * 4,
    "one sequence": [2048],
    "one odd sequence": [2049],
    "short": [7, 300, 1, 64],
    "long and short": [20, 2500, 2500, 33, 4096, 600, 601],
    "a run among others": [100, 700, 700, 700, 700, 1025],
}


@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_the_stretches_of_a_batch_follow_each_other(lengths: list[int]):
    edges = [0]
    for stretch in flash.cut(lengths, torch.device("cpu")):
        assert stretch.rows.start == edges[-1]
        edges.append(stretch.rows.stop)
    assert edges[-1] == sum(lengths)


def test_what_may_be_a_rectangle_is_one_and_the_rest_shares_calls():
    stretches = flash.cut([20, 600, 4500, 4500, 33, 700, 700, 700, 700], torch.device("cpu"))
    kinds = [type(stretch).__name__ for stretch in stretches]
    assert kinds == ["Ragged", "Rectangle", "Rectangle", "Ragged", "Rectangle"]
    assert stretches[-1] == flash.Rectangle(9653, 4, 700)
    (whole,) = flash.cut([512] * 4, torch.device("cpu"))
    assert whole == flash.Rectangle(0, 4, 512)


def test_pieces_that_are_kept_apart_are_stretches_of_their_own():
    (whole,) = flash.ragged([3, 5, 2], [], torch.device("cpu"))
    assert (whole.rows, whole.bounds.tolist()) == (slice(0, 10), [0, 3, 8, 10])
    first, last = flash.ragged([3, 5, 2], [8, 10], torch.device("cpu"))
    assert (first.rows, first.bounds.tolist(), first.longest) == (slice(0, 8), [0, 3, 8], 5)
    assert (last.rows, last.bounds.tolist(), last.longest) == (slice(8, 10), [0, 2], 2)


def test_lengths_are_rounded_to_few_and_by_little():
    lengths = range(flash.LONG, 32768)
    assert len({flash.rounded(n) for n in lengths}) == 4 * 16 + 1
    assert all(n <= flash.rounded(n) < n * 17 / 16 for n in lengths)


# ---------------------------------------------------------------------- on a GPU

HEADS = ModelConfig(
    arch="qwen3", vocab_size=64, hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=2,
    head_size=64, mlp_size=64, norm_eps=1e-6, rope=RopeConfig(theta=1e6), max_context_length=4096,
    windows=(None, 100),
)  # fmt: skip


def truth(tensors, lengths, window):
    """Output and gradients in float64, sequence by sequence."""
    q, k, v, dout = (t.double() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    outs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        mask = mask if window is None else mask.triu(1 - window)
        q, k, v = (t[rows].transpose(0, 1) for t in leaves)
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        outs.append((scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    out = torch.cat(outs)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "windowed"])
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_every_cut_gives_attention_s_own_answer(lengths: list[int], layer: int):
    device = torch.device("cuda")
    assert flash.cudnn_agrees(8, 2, 64, device)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, dout = tensors = [
        torch.randn(sum(lengths), n, 64, device=device, dtype=torch.bfloat16, generator=generator)
        for n in (8, 2, 2, 8)
    ]
    packed = flash.PackedFlash(lengths, HEADS, device)
    out, states = packed.forward(layer, q, k, v)
    grads = packed.backward(layer, dout, q, k, v, out, states)
    want = truth(tensors, lengths, HEADS.window(layer))
    for ours, ref in zip((out, *grads), want, strict=True):
        assert ours.isfinite().all()
        assert torch.linalg.vector_norm(ours.double() - ref) < 0.01 * torch.linalg.vector_norm(ref)

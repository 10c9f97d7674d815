"""A step is the step of torch.optim, and settings that no step can take are refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tinkex.contract.optimizers import OPTIMIZERS, AdamParams, LionParams, MuonParams, check_params
from tinkex.engine.lora.adapter import Adapter, fresh_adapter
from tinkex.engine.numerics.ops import CPU
from tinkex.engine.optim.optimizer import OptimizerState, apply_step
from tinkex.engine.optim.updates import UPDATES, orthogonalize
from tinkex.errors import InvalidInputError


@pytest.fixture
def adapter(tiny) -> Adapter:
    made = fresh_adapter(
        tiny().decoder().targets,
        rank=3,
        alpha=32,
        kinds=("attn", "mlp", "unembed"),
        seed=0,
        device="cpu",
    )
    with torch.no_grad():
        made.flat.normal_(generator=torch.Generator().manual_seed(0))
    return made


def gradients(adapter: Adapter, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(p.shape, generator=generator) for p in adapter.parameters()]
    return adapter.fold(noise)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_three_adamw_steps_match_torch(adapter, clip):
    """R12 and contract 7.4: decoupled decay, bias correction, clipping."""
    params = AdamParams(
        learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1, grad_clip_norm=clip
    )
    peers = [p.detach().clone().requires_grad_() for p in adapter.parameters()]
    peer = torch.optim.AdamW(peers, lr=3e-3, betas=(0.8, 0.9), eps=1e-9, weight_decay=0.1)
    state = OptimizerState.fresh("adamw", adapter)
    for step in range(3):
        grad = gradients(adapter, step)
        for p, g in zip(peers, adapter.views(grad), strict=True):
            p.grad = g.clone()
        total = torch.nn.utils.clip_grad_norm_(peers, clip or math.inf)
        peer.step()
        norm = apply_step(adapter, state, grad, params, CPU)
        assert norm == pytest.approx(float(total), rel=1e-5)
    for ours, theirs in zip(adapter.parameters(), peers, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert state.step == 3


def test_weights_without_gradient_stay_finite_and_still_decay(adapter):
    before = adapter.flat.clone()
    state = OptimizerState.fresh("adamw", adapter)
    params = AdamParams(learning_rate=0.1, weight_decay=0.5)
    assert apply_step(adapter, state, torch.zeros_like(adapter.flat), params, CPU) == 0.0
    torch.testing.assert_close(adapter.flat, before * 0.95)


def test_muon_moves_every_module_by_an_orthogonal_matrix(adapter):
    before = [(a.detach().clone(), b.detach().clone()) for _, a, b in adapter.modules()]
    state = OptimizerState.fresh("muon", adapter)
    apply_step(adapter, state, gradients(adapter, 0), MuonParams(learning_rate=1.0), CPU)
    for (old_a, old_b), (part, a, b) in zip(before, adapter.modules(), strict=True):
        for old, new in ((old_a, a), (old_b, b)):
            scale = math.sqrt(max(1.0, new.shape[0] / new.shape[1]))
            singular = torch.linalg.svdvals((old - new.detach()) / scale)
            assert singular.min() > 0.4, part.target.module
            assert singular.max() < 1.4, part.target.module


def test_muon_momentum_remembers_earlier_gradients(adapter):
    state = OptimizerState.fresh("muon", adapter)
    first = gradients(adapter, 0)
    for grad in (first.clone(), torch.zeros_like(first)):
        apply_step(adapter, state, grad, MuonParams(learning_rate=0.0, momentum=0.9), CPU)
    torch.testing.assert_close(state.moments["momentum"], 0.9 * first)


def test_three_lion_steps_match_the_paper_in_float64(adapter):
    """Algorithm 2 of arXiv 2302.06675, over one vector in double precision."""
    params = LionParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, weight_decay=0.1)
    state = OptimizerState.fresh("lion", adapter)
    weights, momentum = adapter.flat.double(), torch.zeros_like(adapter.flat).double()
    for step in range(3):
        grad = gradients(adapter, step)
        direction = torch.sign(0.8 * momentum + 0.2 * grad.double())
        weights = weights - 3e-3 * (direction + 0.1 * weights)
        momentum = 0.9 * momentum + 0.1 * grad.double()
        apply_step(adapter, state, grad, params, CPU)
    torch.testing.assert_close(adapter.flat.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.moments["exp_avg"].double(), momentum, rtol=1e-5, atol=1e-6)


def test_every_declared_optimizer_has_its_update():
    assert set(UPDATES) == set(OPTIMIZERS)
    assert all(len(update.moments) <= 2 for update in UPDATES.values())


def test_orthogonalize_keeps_the_directions():
    torch.manual_seed(0)
    matrix = torch.randn(6, 4)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    aligned = u.t() @ orthogonalize(matrix, num_steps=10) @ v.t()
    off_diagonal = aligned - torch.diag(aligned.diag())
    assert off_diagonal.abs().max() < 1e-3
    assert aligned.diag().min() > 0.6


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
        {"weight_decay": math.inf},
        {"grad_clip_norm": -1.0},
    ],
)
def test_impossible_settings_name_the_field(wrong):
    with pytest.raises(InvalidInputError) as caught:
        check_params("adamw", dataclasses.replace(AdamParams(), **wrong))
    assert caught.value.path == f"optim_params.{next(iter(wrong))}"


def test_parameters_of_another_optimizer_are_refused():
    with pytest.raises(InvalidInputError, match=r"created with optimizer 'muon'.*'adamw'"):
        check_params("muon", AdamParams())

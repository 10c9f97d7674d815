"""How each optimizer that `contract.optimizers` declares changes weights, told twice.

`step` works on the tensors of an adapter: the real engine. `toy_step` works on the columns of the
toy's table. Clipping and weight decay, which are the same for all, are done by the callers
beforehand. Torch is imported when a step needs it, so that the toy runs without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.optimizers import AdamParams, LionParams, MuonParams

if TYPE_CHECKING:
    from torch import Tensor

    from tinkex.engine.lora.adapter import Adapter
    from tinkex.engine.numerics.ops import Ops

F = NDArray[np.float64]
Moments = Mapping[str, "Tensor"]


class Update(NamedTuple):
    """Both forms of one optimizer. The step counts from 1."""

    scratch: tuple[int, int]
    """Copies that a step makes on its way, at most: of what is here of an adapter, and of all of
    it, which is more where the base model is cut over several devices."""
    moments: tuple[str, ...]
    """The state kept per parameter, by its name in checkpoints; the toy has room for two."""
    step: Callable[[Ops, Adapter, Moments, Tensor, int, Any], None]
    """(operations, adapter, moments, gradient, number of the step, parameters), in place."""
    toy_step: Callable[[F, F, F, F, int, Any], None]
    """(weights, gradient, first moment, second moment, number, parameters), in place."""


def _adamw(
    ops: Ops, adapter: Adapter, moments: Moments, grad: Tensor, step: int, params: AdamParams
) -> None:
    ops.adamw_(adapter.flat, moments["exp_avg"], moments["exp_avg_sq"], grad, step, params)


def _toy_adamw(weights: F, grad: F, first: F, second: F, step: int, params: AdamParams) -> None:
    first[:] = params.beta1 * first + (1 - params.beta1) * grad
    second[:] = params.beta2 * second + (1 - params.beta2) * grad**2
    m_hat = first / (1 - params.beta1**step)
    v_hat = second / (1 - params.beta2**step)
    weights -= params.learning_rate * m_hat / (np.sqrt(v_hat) + params.eps)


def _muon(
    ops: Ops, adapter: Adapter, moments: Moments, grad: Tensor, step: int, params: MuonParams
) -> None:
    """Momentum, then every module's matrix is replaced by its nearest orthogonal one."""
    momentum = moments["momentum"].mul_(params.momentum).add_(grad)

    def change(weight: Tensor, looked_ahead: Tensor) -> None:
        update = orthogonalize(looked_ahead)
        scale = math.sqrt(max(1.0, update.shape[0] / update.shape[1]))
        weight.add_(update, alpha=-params.learning_rate * scale)

    adapter.change_matrices(grad + params.momentum * momentum, change)


def _toy_muon(weights: F, grad: F, first: F, second: F, step: int, params: MuonParams) -> None:
    """On a table of scalars the nearest orthogonal matrix is the sign."""
    first[:] = params.momentum * first + grad
    weights -= params.learning_rate * np.sign(first)


def _lion(
    ops: Ops, adapter: Adapter, moments: Moments, grad: Tensor, step: int, params: LionParams
) -> None:
    """Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675)."""
    momentum = moments["exp_avg"]
    direction = momentum.lerp(grad, 1 - params.beta1).sign_()
    momentum.lerp_(grad, 1 - params.beta2)
    adapter.flat.add_(direction, alpha=-params.learning_rate)


def _toy_lion(weights: F, grad: F, first: F, second: F, step: int, params: LionParams) -> None:
    weights -= params.learning_rate * np.sign(params.beta1 * first + (1 - params.beta1) * grad)
    first[:] = params.beta2 * first + (1 - params.beta2) * grad


def orthogonalize(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """Push all singular values of a matrix towards one (quintic Newton-Schulz iteration)."""
    import torch

    # Jordan et al., Muon (2024): chosen to converge fast, to about 1 and not exactly to it.
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.t() if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if tall else x


UPDATES: Mapping[str, Update] = {
    "adamw": Update((1, 0), ("exp_avg", "exp_avg_sq"), _adamw, _toy_adamw),
    "muon": Update((1, 3), ("momentum",), _muon, _toy_muon),
    "lion": Update((1, 0), ("exp_avg",), _lion, _toy_lion),
}

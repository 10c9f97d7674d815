"""The operations of a CUDA card with Triton kernels. It imports triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.cuda import draw_kernels, kernels, optimizer_kernels
from tinkex.engine.cuda.ops import CudaOps
from tinkex.engine.numerics import picking


class KernelOps(CudaOps):
    """See `Ops`."""

    fuses_softmax = True

    def log_total(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        top_N, log_total_N = kernels.log_total(logits_NV)
        return top_N[:, None], log_total_N[:, None]

    def subtract_top_(self, logits_NV: Tensor) -> Tensor | None:
        # By the kernel and not from the exponentials: to the bit what the sampler reported.
        top_N1, log_total_N1 = self.log_total(logits_NV)
        logits_NV -= top_N1
        return log_total_N1

    def logit_gradient(
        self, logits_NV: Tensor, log_sum_N: Tensor, targets_N: Tensor, slopes_N: Tensor
    ) -> Tensor:
        return kernels.logit_gradient(logits_NV, log_sum_N, targets_N, slopes_N, torch.bfloat16)

    def pick(self, scaled_NX: Tensor, uniform_N3: Tensor) -> tuple[Tensor, Tensor]:
        if (picked := draw_kernels.pick(scaled_NX, uniform_N3, picking.ONE)) is not None:
            return picked[0], picking.log_weight(picked[1])
        return picking.pick(scaled_NX, uniform_N3)

    def norm(self, flat_P: Tensor) -> float:
        return optimizer_kernels.norm(flat_P)

    def adamw_(
        self,
        weights_P: Tensor,
        first_P: Tensor,
        second_P: Tensor,
        grad_P: Tensor,
        step: int,
        params: AdamParams,
    ) -> None:
        optimizer_kernels.adamw_(weights_P, first_P, second_P, grad_P, step, params)

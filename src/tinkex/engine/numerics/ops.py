"""Operations whose best form depends on the device, as one value that is handed down.

`Ops` is the plain form, in torch on a CPU, and the oracle of the others. `cuda.ops` has that of a
GPU, `cuda.kernel_ops` the one with Triton kernels; `device.backend` alone chooses. A decoder has
its `ops`, and trainer, sampler and checkpoints use those of their decoder, so no other module asks
which device there is.

Shapes: N rows, V vocabulary, K columns, X cells, P parameters of an adapter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.numerics import picking, softmax
from tinkex.engine.numerics.memory_in_use import free_bytes
from tinkex.errors import ConfigError


class Ops:
    """Arithmetic, transfers and memory of one device."""

    fills_rows = True
    """Whether deterministic mode fills products up with rows (`row_filling`) and attends exactly;
    on a GPU the kernels themselves are the same for any number of rows."""
    large_passes = False
    """Whether only passes of many thousand tokens keep the device busy."""
    adds_in_product = False
    """Whether a residual is added inside a product: the sum is then rounded to bf16 once."""
    keeps_pairs = True
    """Whether attention with sinks keeps a weight for each pair of tokens for its backward."""
    fuses_softmax = False
    """Whether `logit_gradient` reads logits once; else losses work in the memory of the logits."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    # --------------------------------------------------------------------------------- device

    def compute_dtype(self, wanted: torch.dtype | None = None) -> torch.dtype:
        """The type of base weights and activations: fp32 here, whatever the checkpoint's type."""
        if wanted not in (None, torch.float32, torch.float64):
            raise ConfigError(
                f"dtype {wanted} is not computed on {self.device.type}: some CPUs end the process "
                "at the first bf16 product. Leave it out; the weights are widened to float32."
            )
        return wanted or torch.float32

    def use_in_thread(self) -> None:
        """Make this device the current one of the calling thread."""

    def make_deterministic(self) -> None:
        """Have torch choose kernels that add in one order; call it before the first product."""

    def free_bytes(self) -> int:
        """Memory that new tensors can take."""
        return free_bytes()

    def total_bytes(self) -> int:
        """Memory of the whole device."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def empty_cache(self) -> None:
        """Return memory that torch keeps for later to the device."""

    # ------------------------------------------------------------------------------ transfers

    def send(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers, nested lists of them or a numpy array, as a tensor on the device."""
        return torch.as_tensor(values, dtype=dtype)

    def fetch(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start to copy tensors to the host; the result waits for them and gives them."""
        return lambda: tensors

    def host_copier(self) -> Callable[[Tensor], Tensor]:
        """A function for another thread that copies tensors, as they are now, to the host."""
        return lambda tensor: tensor

    # -------------------------------------------------------------------------------- softmax

    def log_total(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """(the largest logit, the log of the sum of exp(logit - largest)) of each row, [N, 1]."""
        return softmax.log_total(logits_NV)

    def logprobs_of(self, logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
        """Log softmax at some columns of each row."""
        top_N1, log_total_N1 = self.log_total(logits_NV)
        return logits_NV.gather(1, ids_NK) - top_N1 - log_total_N1

    def subtract_top_(self, logits_NV: Tensor) -> Tensor | None:
        """Subtract each row's largest logit, in place; the log of its total, if it is known by now.

        None: the caller, who needs the exponentials anyway, takes the log of their sum.
        """
        logits_NV -= logits_NV.amax(1, keepdim=True)
        return None

    def logit_gradient(
        self, logits_NV: Tensor, log_sum_N: Tensor, targets_N: Tensor, slopes_N: Tensor
    ) -> Tensor:
        """slope * (one-hot of the target - softmax) of each row, where `fuses_softmax`."""
        gradient_NV = (logits_NV - log_sum_N[:, None]).exp_().mul_(-slopes_N[:, None])
        return gradient_NV.scatter_add_(1, targets_N[:, None], slopes_N[:, None])

    def pick(self, scaled_NX: Tensor, uniform_N3: Tensor) -> tuple[Tensor, Tensor]:
        """(a cell of each row by its weight [N], the log of the row's weight [N])."""
        return picking.pick(scaled_NX, uniform_N3)

    # ------------------------------------------------------------------------------ optimizer

    def norm(self, flat_P: Tensor) -> float:
        """The 2-norm of a buffer, summed in float64, as one number on the host."""
        return float(torch.linalg.vector_norm(flat_P, dtype=torch.float64))

    def adamw_(
        self,
        weights_P: Tensor,
        first_P: Tensor,
        second_P: Tensor,
        grad_P: Tensor,
        step: int,
        params: AdamParams,
    ) -> None:
        """Apply a step of Adam without weight decay, counted from 1, in place."""
        first_P.lerp_(grad_P, 1 - params.beta1)
        second_P.mul_(params.beta2).addcmul_(grad_P, grad_P, value=1 - params.beta2)
        correction1 = 1 - params.beta1**step
        correction2 = 1 - params.beta2**step
        # A float: torch takes no whole number past 2^63, which JSON may hold.
        denominator = second_P.sqrt().div_(math.sqrt(correction2)).add_(float(params.eps))
        weights_P.addcdiv_(first_P, denominator, value=-params.learning_rate / correction1)


CPU = Ops()

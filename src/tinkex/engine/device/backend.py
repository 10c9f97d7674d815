"""Choose what a base model runs on: the one module that asks which device there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinkex.engine.cuda import HAS_TRITON
from tinkex.engine.cuda.ops import CudaOps, multiplies_bf16
from tinkex.engine.model.base_model import ModelSource, resolve
from tinkex.engine.model.decoder import Decoder, DecoderLike
from tinkex.engine.model.loading import keeps_packed
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import WeightReader, open_weights
from tinkex.engine.numerics.ops import CPU, Ops
from tinkex.errors import ConfigError

if TYPE_CHECKING:
    from tinkex.engine.cuda.warm_up import WarmUp


def find_device(name: str) -> torch.device:
    """The device of a setting: `cpu`, `cuda`, `cuda:N`, `auto` or `auto:N`.

    Raises:
        ConfigError: This machine has no such device.
    """
    kind, _, number = name.partition(":")
    if kind == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if number and int(number) >= torch.cuda.device_count():
            raise ConfigError(
                f"worker {number} has no GPU: there are {torch.cuda.device_count()}. Start "
                "with --workers (times --group) of at most that many, or with --device cpu."
            )
        return torch.device(f"cuda:{number}" if number else "cuda")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ConfigError(
            f"engine.device is {name!r}, but torch sees "
            f"{torch.cuda.device_count()} GPUs, counted from cuda:0"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {name!r}, but torch sees no GPU; use 'cpu'")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"engine.device is {name!r}: only CUDA cards and CPUs are supported. Use "
            "'cpu', which runs on an Apple machine too."
        )
    return device


def ops_for(device: torch.device | str) -> Ops:
    """The operations of a device: with Triton's kernels on a CUDA card where Triton exists."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    # Triton exists for Linux only; on Windows torch runs CUDA without our kernels.
    if not HAS_TRITON:
        return CudaOps(device)
    from tinkex.engine.cuda.kernel_ops import KernelOps

    return KernelOps(device)


def load_decoder(
    model: str | ModelSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weights: WeightReader | None = None,
) -> DecoderLike:
    """Load a base model by name, path or source: our decoder when it can, else transformers'.

    With `weights`, our decoder reads from there.
    """
    source = resolve(model) if isinstance(model, str) else model
    config, ops = source.config(), ops_for(device)
    if not config.native:
        from tinkex.engine.model.foreign import ForeignDecoder

        return ForeignDecoder(source, config, ops=ops, dtype=dtype)
    kind = decoder_class(config, ops.device)
    reader = weights or open_weights(source, config)
    packed = keeps_packed(config, reader, source.name, ops, ops.compute_dtype(dtype))
    return kind(config, reader, ops=ops, dtype=dtype, keep_packed=packed)


def decoder_class(config: ModelConfig, device: torch.device | str) -> type[Decoder]:
    """A fused decoder where one knows the model's shape, the plain one elsewhere."""
    if not _runs_fused_layers(torch.device(device)):
        return Decoder
    from tinkex.engine.cuda.fused import CudaDecoder, can_fuse

    if can_fuse(config):
        return CudaDecoder
    from tinkex.engine.cuda.mixed_layers import MixedLayerDecoder, can_run

    return MixedLayerDecoder if can_run(config) else Decoder


def warm_up(source: ModelSource, device: torch.device) -> WarmUp | None:
    """Compile what a dense model will run while its weights are read; None for all others."""
    if not _runs_fused_layers(device):
        return None
    from tinkex.engine.cuda.fused import can_fuse
    from tinkex.engine.cuda.warm_up import WarmUp

    config = source.config()
    return WarmUp(config, ops_for(device)) if can_fuse(config) else None


def _runs_fused_layers(device: torch.device) -> bool:
    """Whether fused layers run here: they need Triton and bf16, which not all cards have."""
    return device.type == "cuda" and HAS_TRITON and multiplies_bf16(device)

"""Choose what a base model runs on: the one module that asks which device there is."""

from __future__ import annotations

import torch

from tinkex.engine.cuda import HAS_TRITON
from tinkex.engine.model.base_model import ModelSource, resolve
from tinkex.engine.model.decoder import Decoder, DecoderLike, compute_dtype, multiplies_bf16
from tinkex.engine.model.loading import keeps_packed
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import WeightReader, open_weights


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
    config = source.config()
    if not config.native:
        from tinkex.engine.model.foreign import ForeignDecoder

        return ForeignDecoder(source, config, device=device, dtype=dtype)
    device = torch.device(device)
    kind = _decoder_class(config, device)
    reader = weights or open_weights(source, config)
    packed = keeps_packed(config, reader, source.name, device, compute_dtype(device, dtype))
    return kind(config, reader, device=device, dtype=dtype, keep_packed=packed)


def _decoder_class(config: ModelConfig, device: torch.device | str) -> type[Decoder]:
    """A fused decoder where one knows the model's shape, the plain one elsewhere."""
    if not runs_kernels(torch.device(device)):
        return Decoder
    from tinkex.engine.cuda.fused import CudaDecoder, can_fuse

    if can_fuse(config):
        return CudaDecoder
    from tinkex.engine.cuda.mixed_layers import MixedLayerDecoder, can_run

    return MixedLayerDecoder if can_run(config) else Decoder


def runs_kernels(device: torch.device) -> bool:
    """Whether our kernels run here: they need triton and bf16, which not all machines have."""
    return device.type == "cuda" and HAS_TRITON and multiplies_bf16(device)

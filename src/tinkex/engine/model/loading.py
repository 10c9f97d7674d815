"""Take a native model's weights from a reader to the device, one tensor at a time, all checked.

Names and shapes come from `weights.expected_shapes`; a tensor that is missing or of another shape
is refused before it is used, and a model that cannot fit is refused before anything is read. The
host never holds more than one tensor beside what the device keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.engine.model.delta import DeltaWeights
from tinkex.engine.model.mixture import MixtureWeights
from tinkex.engine.model.packed_weights import free_bytes
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.model.weights import WeightReader, expected_shapes
from tinkex.errors import InvalidInputError, NotSupportedError


class Loader:
    """Reads weights and puts them where and in which type the decoder wants them."""

    def __init__(
        self, config: ModelConfig, weights: WeightReader, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self._weights, self._device, self._dtype = config, weights, device, dtype
        self._shapes = dict(expected_shapes(config))

    def one(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._weights.read(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise InvalidInputError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}; config.json asks for "
                f"{self._shapes[name]}"
            )
        return tensor.to(self._device, dtype or self._dtype).contiguous()

    def maybe(self, name: str) -> Tensor | None:
        """None for what this model does not have."""
        return self.one(name) if name in self._shapes else None

    def norm(self, name: str) -> Tensor:
        if not self.config.norm_offset:
            return self.one(name)
        # Near one, bf16 has two digits: such weights stay in fp32.
        wide = self.one(name, torch.promote_types(self._dtype, torch.float32))
        return wide.add_(1.0)

    def maybe_norm(self, name: str) -> Tensor | None:
        return self.norm(name) if name in self._shapes else None

    def fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor:
        return torch.cat([self.one(f"{prefix}{name}.{suffix}") for name in names])

    def maybe_fused(self, prefix: str, names: tuple[str, ...], suffix: str) -> Tensor | None:
        there = f"{prefix}{names[0]}.{suffix}" in self._shapes
        return self.fused(prefix, names, suffix) if there else None

    # --------------------------------------------------------------------------- larger pieces

    def delta(self, prefix: str) -> DeltaWeights:
        config, name = self.config.delta, f"{prefix}linear_attn."
        assert config is not None
        wide = torch.promote_types(self._dtype, torch.float32)
        return DeltaWeights(
            config,
            self.one(name + "conv1d.weight").squeeze(1),
            self.one(name + "A_log", wide).exp().neg(),
            self.one(name + "dt_bias", wide),
            self.one(name + "norm.weight"),
        )

    def mixture(self, prefix: str) -> MixtureWeights:
        name = f"{prefix}mlp."
        shared = f"{name}shared_expert."
        return MixtureWeights(
            self.one(name + "gate.weight"),
            self.maybe(name + "gate.bias"),
            self.one(name + "experts.gate_up_proj"),
            self.maybe(name + "experts.gate_up_proj_bias"),
            self.one(name + "experts.down_proj"),
            self.maybe(name + "experts.down_proj_bias"),
            self.maybe_fused(shared, ("gate_proj", "up_proj"), "weight"),
            self.maybe(shared + "down_proj.weight"),
            self.maybe(name + "shared_expert_gate.weight"),
        )


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What the weights of a native model take on the device."""
    sizes = (torch.Size(shape).numel() for _, shape in expected_shapes(config))
    return sum(sizes) * dtype.itemsize


def check_room(config: ModelConfig, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a model that is larger than what the device has free, before anything is read."""
    needed = weight_bytes(config, dtype)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()
    if needed > free:
        raise NotSupportedError(
            f"{name} needs {needed / 1e9:.1f} GB for its weights in "
            f"{str(dtype).removeprefix('torch.')}; {device} has {free / 1e9:.1f} GB free. Use a "
            "larger device or a smaller model."
        )

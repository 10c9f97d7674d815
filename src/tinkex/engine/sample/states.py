"""The memory of the states of delta layers, by slot; see `state_pool` for who has which.

Shapes: S slots, w the convolution's width less one, C its channels, H value heads, k and v their
sizes, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.model.delta import DeltaState
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.sample import slabs
from tinkex.engine.sample.state_pool import Copy


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one slot; 0 for a model without delta layers."""
    delta = config.delta
    if delta is None:
        return 0
    heads = delta.value_heads * delta.key_size * delta.value_size * 4
    conv = (delta.conv_width - 1) * delta.channels * dtype.itemsize
    return len(config.delta_layers) * (heads + conv)


class StateCache:
    """The states of all delta layers, by slot. The heads' are fp32 (or wider, as the model is)."""

    def __init__(
        self, config: ModelConfig, num_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        delta, layers = config.delta, config.delta_layers
        assert delta is not None
        self._index_of_layer = {layer: at for at, layer in enumerate(layers)}
        heads = (delta.value_heads, delta.key_size, delta.value_size)
        # A state gathers over a whole sequence; in bf16 it would soon lose what a token adds.
        wide = torch.promote_types(dtype, torch.float32)
        self.spare = num_slots
        """One more slot, for rows of a pass that belong to no sequence."""
        num_slots += 1
        self.conv_LSwC = slabs.zeros(
            (len(layers), num_slots, delta.conv_width - 1, delta.channels), device, dtype
        )
        self.heads_LSHkv = slabs.zeros((len(layers), num_slots, *heads), device, wide)
        self.size_bytes = self.conv_LSwC.nbytes + self.heads_LSHkv.nbytes

    def layer(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """The memory of one layer's states."""
        at = self._index_of_layer[layer_index]
        return self.conv_LSwC[at], self.heads_LSHkv[at]

    def read(self, layer_index: int, slots_B: Tensor) -> DeltaState:
        conv_SwC, heads_SHkv = self.layer(layer_index)
        return DeltaState(conv_SwC.index_select(0, slots_B), heads_SHkv.index_select(0, slots_B))

    def write(self, layer_index: int, slots_B: Tensor, state: DeltaState) -> None:
        conv_SwC, heads_SHkv = self.layer(layer_index)
        conv_SwC.index_copy_(0, slots_B, state.conv_BwC)
        heads_SHkv.index_copy_(0, slots_B, state.heads_BHkv)

    def clear(self, slots: Sequence[int]) -> None:
        """Where a sequence begins; also ends numbers that are not finite."""
        # Zeros, whatever was there: 0 times infinity would not be 0.
        slabs.clear((self.conv_LSwC, self.heads_LSHkv), slots)

    def copy(self, pairs: Sequence[Copy]) -> None:
        slabs.copy((self.conv_LSwC, self.heads_LSHkv), pairs)

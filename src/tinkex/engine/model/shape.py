"""The shape of a causal language model, as the decoder, the loader and the caches read it.

Plain values, whether they came from a Hugging Face `config.json` or from GGUF metadata. A layer is
a mixer (attention, or a gated delta rule) and an MLP (dense, or a mixture of experts); what a
config does not say is off. Nothing here touches a tensor or a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.contract.routing import ExpertCounts
from tinkex.errors import NotSupportedError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base, and how it is stretched for longer contexts."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the edges of its ramp are whole numbers."""
    attention_factor: float = 1.0
    """yarn: cosines and sines are multiplied with this."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise NotSupportedError(
                f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of a dense MLP: softmax over all, then the best few."""

    count: int
    per_token: int
    size: int
    """Width of one expert."""
    normalised: bool = True
    """The weights of a token's experts sum to one."""
    biased: bool = False
    """Router and experts have biases."""
    clamp: float | None = None
    """Gate and up are cut at this, and combined as gate * sigmoid(1.702 gate) * (up + 1)."""
    shared_size: int = 0
    """Width of an expert that every token passes, behind a sigmoid gate; 0: there is none."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise NotSupportedError(
                f"a token cannot pass {self.per_token} of {self.count} experts (config.json)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig:
    """A gated delta rule in place of attention: a state per sequence instead of keys and values."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_width: int = 4
    by_head: bool = False
    """Two linears in place of four, whose rows go key head by key head: query, key, values and gate
    of one, then those of the next; so too strength and decay."""

    @property
    def linears(self) -> dict[str, int]:
        """The linears in front of the convolution, and how many rows each has."""
        if self.by_head:
            return {
                "in_proj_qkvz": self.channels + self.values,
                "in_proj_ba": 2 * self.value_heads,
            }
        return {
            "in_proj_qkv": self.channels,
            "in_proj_z": self.values,
            "in_proj_b": self.value_heads,
            "in_proj_a": self.value_heads,
        }

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values side by side."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of one causal language model."""

    arch: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    norm_eps: float
    rope: RopeConfig
    max_context_length: int
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    """q and k are normed over all their heads together, not head by head."""
    qkv_clip: float | None = None
    """Queries, keys and values are cut at this."""
    attn_gate: bool = False
    """Each query head comes with a gate; its sigmoid multiplies the head's output."""
    sinks: bool = False
    """Each query head has one more logit, of a key without a value."""
    norm_offset: bool = False
    """The norms' weights are stored as their distance from one."""
    rotary_size: int | None = None
    """Dimensions of a head that are rotated; None: all."""
    windows: tuple[int | None, ...] = ()
    """Per layer: the attention window in tokens, None for full causal. Empty: full everywhere."""
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture that keep a dense MLP."""
    delta: DeltaConfig | None = None
    delta_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    native: bool = True
    """False: the transformers implementation runs this model behind the same interface."""

    def window(self, layer_index: int) -> int | None:
        return self.windows[layer_index] if self.windows else None

    def has_experts(self, layer_index: int) -> bool:
        return self.experts is not None and layer_index not in self.dense_layers

    def has_delta(self, layer_index: int) -> bool:
        return layer_index in self.delta_layers

    def kept_values(self, layer_index: int) -> int:
        """Numbers that a layer keeps per token for its backward pass."""
        kept = 2 * self.hidden_size
        if self.has_delta(layer_index) and self.delta is not None:
            # The fused linear, its convolution, then queries, keys, values and outputs in fp32.
            kept += 8 * self.delta.channels + 4 * self.delta.values
        else:
            heads = self.num_heads * (2 + self.attn_gate + self.qk_norm) + 2 * self.num_kv_heads
            kept += heads * self.head_size
        if self.has_experts(layer_index) and self.experts is not None:
            each = 2 * self.hidden_size + 3 * self.experts.size
            return kept + self.experts.per_token * each + 3 * self.experts.shared_size
        return kept + 2 * self.mlp_size

    def kept_bytes(self, lengths: Sequence[int], itemsize: int, *, with_pairs: bool = False) -> int:
        """Bytes that all layers keep of sequences, when nothing is computed again.

        `with_pairs`: as a CPU does, see `kept_pairs`.
        """
        kept = sum(lengths) * sum(map(self.kept_values, range(self.num_layers)))
        if with_pairs:
            kept += self.kept_pairs * sum(length**2 for length in lengths)
        return kept * itemsize

    @property
    def kept_pairs(self) -> int:
        """Numbers that plain attention keeps per query and key: its weights, where it has sinks."""
        return self.num_heads * len(self.attention_layers) if self.sinks else 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts."""
        return tuple(i for i in range(self.num_layers) if self.has_experts(i))

    @property
    def routing(self) -> ExpertCounts | None:
        """The counts that shape `routed_experts` here; None: this is no mixture."""
        if self.experts is None or not self.expert_layers:
            return None
        return ExpertCounts(self.experts.count, self.experts.per_token, len(self.expert_layers))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with keys and values."""
        return tuple(i for i in range(self.num_layers) if i not in self.delta_layers)

"""Any other causal language model, through transformers' own implementation.

The same interface as `decoder.py`, slower: transformers computes the layers, but attention goes to
our `Attend` and every linear, those of experts too, carries our LoRA, so packing, tenants and the
sampler's paged cache work unchanged. Layers are recomputed in the backward pass when the trainer
asks for that. At load a probe compares the result with the untouched model: a model that does more
than this wrapper sees (capped logits, state-space layers, attention sinks) is refused, never
computed wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinkex.engine.lora.adapter import Kind, LoraBatch, Target, TargetPart
from tinkex.engine.model.attention import Attend, PackedCausal
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.decoder import DecoderLike
from tinkex.engine.model.experts import Experts, is_experts
from tinkex.engine.model.layers import linear
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.numerics.ops import CPU, Ops
from tinkex.errors import NotSupportedError

_BACKEND = "tinkex"
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
_PROBE_TOKENS = 12


class ForeignDecoder(DecoderLike):
    """A transformers model behind the decoder's interface. One thread at a time."""

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        *,
        ops: Ops = CPU,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.ops, self.device = config, ops, ops.device
        self.dtype = ops.compute_dtype(dtype)
        self._name = source.name
        model = _load(source, config, self.dtype)
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._logit_factor = _logit_factor(self._model.config)
        self._batch = _Batch()
        self._num_attended = 0
        self._recompute = False
        tokens_T = torch.arange(_PROBE_TOKENS, device=self.device) % config.vocab_size
        try:
            with torch.no_grad():
                expected_TV = self._model(tokens_T[None], use_cache=False).logits[0].float()
        except (AttributeError, KeyError, RuntimeError, TypeError) as exc:
            self._refuse(f"a forward pass that fails in transformers itself ({exc})", exc)
        _register_backend()
        # From here on the model attends through us; `expected_TV` is of the untouched one.
        self._model.set_attn_implementation(_BACKEND)
        self.targets = dict(self._adapt())
        self.uncovered = dict(reversed(list(self._bare_weights())))  # the first of each kind
        self._wrap_layers()
        try:
            self._probe(tokens_T, expected_TV)
        except (AttributeError, KeyError, RuntimeError, TypeError) as exc:
            self._refuse(f"a forward pass that our wrapper cannot follow ({exc})", exc)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraBatch | None = None,
        *,
        room: float = math.inf,
        routing: Routing | None = None,
    ) -> Tensor:
        """`routing` is not known here: transformers' routers are out of sight."""
        self._num_attended = 0
        # transformers' layers keep 2.0 to 2.2 times as much as ours would.
        kept_bytes = self.config.kept_bytes([len(tokens_T)], self.dtype.itemsize) * 2.2
        self._recompute = kept_bytes > room and torch.is_grad_enabled()
        with self._using(_Batch(attend, lora, len(tokens_T))):
            out = self._model.base_model(
                input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False
            )
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    def head(self, hidden_ND: Tensor, lora: LoraBatch | None = None) -> Tensor:
        with self._using(_Batch(None, lora, len(hidden_ND))):
            logits_NV: Tensor = self._model.get_output_embeddings()(hidden_ND)
        return logits_NV.float() * self._logit_factor

    def head_backward(
        self, dlogits_NV: Tensor, hidden_ND: Tensor, lora: LoraBatch | None = None
    ) -> Tensor:
        hidden_ND = hidden_ND.detach().requires_grad_()
        with torch.enable_grad():
            logits_NV = self.head(hidden_ND, lora)
        logits_NV.backward(dlogits_NV)
        assert hidden_ND.grad is not None
        return hidden_ND.grad

    # ------------------------------------------------------------------------------- wrapping

    @contextmanager
    def _using(self, batch: _Batch) -> Iterator[None]:
        """Set the batch that the wrapped modules find while they run."""
        before, self._batch = self._batch, batch
        try:
            yield
        finally:
            self._batch = before

    def _wrap_layers(self) -> None:
        """Let every decoder layer keep its inputs only, and run again in the backward pass.

        Not by transformers' own switch: that one works in training mode alone, with dropout.
        """
        num_layers = self.config.num_layers
        stacks = [
            module
            for module in self._model.base_model.modules()
            if isinstance(module, nn.ModuleList) and len(module) == num_layers
        ]
        if len(stacks) != 1:
            self._refuse(f"{len(stacks)} lists of {num_layers} layers, where one is expected")
        for layer in stacks[0]:
            layer.forward = self._recomputing(layer.forward)

    def _recomputing(self, compute: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._recompute:
                return compute(*args, **kwargs)
            batch = self._batch

            def again(*args: Any) -> Any:
                with self._using(batch):
                    return compute(*args, **kwargs)

            return checkpoint(again, *args, use_reentrant=False)

        return forward

    def _adapt(self) -> Iterator[tuple[str, Target]]:
        """Let every attention module find us, and every linear carry adapters."""
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if hasattr(module, "layer_idx"):
                module.tinkex_attend = self._run_attend
            if is_experts(module):
                experts = Experts(name, module, lambda: self._batch.lora)
                module.forward = experts
                yield from experts.targets().items()
            weight_OI = _weight(module)
            kind = _kind(name, module is head)
            if weight_OI is not None and kind is not None:
                module.forward = self._adapted_linear(name, weight_OI, module.bias)
                part = TargetPart(name, kind, 0, weight_OI.shape[0])
                yield name, Target(weight_OI.shape[1], (part,))

    def _bare_weights(self) -> Iterator[tuple[Kind, str]]:
        """Matrices of the layers that carry no adapter, though their kind can be asked for."""
        for name, module in self._model.named_modules():
            wrapped = isinstance(module.forward, Experts) or _weight(module) is not None
            if wrapped or isinstance(module, nn.Embedding):
                continue
            for leaf, weight in module.named_parameters(recurse=False):
                kind = _kind(name, is_head=False)
                if weight.ndim >= 2 and kind is not None:
                    yield kind, f"{name}.{leaf}"

    def _adapted_linear(self, key: str, weight_OI: Tensor, bias_O: Tensor | None) -> Any:
        def forward(x: Tensor) -> Tensor:
            x_TI, lora = x.flatten(0, -2), self._batch.lora
            if lora is not None and len(x_TI) != self._batch.num_rows:
                self._refuse(f"a linear, {key}, that sees {len(x_TI)} of the batch's rows")
            terms = () if lora is None else lora.terms(key)
            return linear(x_TI, weight_OI, bias_O, terms).view(*x.shape[:-1], -1)

        return forward

    def _run_attend(
        self, layer_index: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, window: int | None
    ) -> Tensor:
        config = self.config
        expected = (config.num_kv_heads, config.head_size)
        if tuple(k_TKd.shape[1:]) != expected or tuple(v_TKd.shape[1:]) != expected:
            self._refuse(f"keys of shape {tuple(k_TKd.shape[1:])} instead of {expected}")
        if window != config.window(layer_index):
            self._refuse(
                f"an attention window of {window} in layer {layer_index}, where its config says "
                f"{config.window(layer_index)}"
            )
        assert self._batch.attend is not None
        self._num_attended += 1
        return self._batch.attend(layer_index, q_THd, k_TKd, v_TKd)

    def _probe(self, tokens_T: Tensor, expected_TV: Tensor) -> None:
        attend = PackedCausal([0, len(tokens_T)], self.config.windows)
        positions_T = torch.arange(len(tokens_T), device=self.device)
        with torch.no_grad():
            logits_TV = self.head(self.forward(tokens_T, positions_T, attend))
        if self._num_attended != self.config.num_layers:
            self._refuse(
                f"attention in {self._num_attended} of {self.config.num_layers} layers only"
            )
        error = float((logits_TV - expected_TV).abs().max() / expected_TV.abs().max())
        if not error < (1e-4 if self.dtype == torch.float32 else 0.1):
            self._refuse(f"a part we do not compute (its logits would be off by {error:.1e})")

    def _refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise NotSupportedError(
            f"model type {self.config.arch!r} of {self._name!r} is not supported: it has {what}"
        ) from cause


@dataclass(frozen=True, slots=True)
class _Batch:
    """The attention and the adapters of the pass that runs."""

    attend: Attend | None = None
    lora: LoraBatch | None = None
    num_rows: int = 0


def _load(source: ModelSource, config: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            source.path, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    except (ValueError, KeyError, OSError, ImportError) as exc:
        raise NotSupportedError(
            f"transformers cannot load {source.name!r} (model type {config.arch!r}): {exc}"
        ) from exc


def _logit_factor(config: Any) -> float:
    """The factor of the logits: Cohere multiplies them, Granite divides."""
    return float(getattr(config, "logit_scale", None) or 1) / float(
        getattr(config, "logits_scaling", None) or 1
    )


def _weight(module: nn.Module) -> Tensor | None:
    """[out, in] of a plain linear; GPT-2's Conv1D stores the transpose."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module).__name__ == "Conv1D":
        weight_IO: Any = module.weight
        return torch.t(weight_IO.detach())
    return None


def _kind(name: str, is_head: bool) -> Kind | None:
    if is_head:
        return "unembed"
    leaf = name.rpartition(".")[2]
    if leaf in ("gate", "router", "shared_expert_gate") or "router" in name:
        return None  # routing decides where tokens go; adapters do not change it
    return "attn" if "attn" in name or "attention" in name.lower() else "mlp"


def _register_backend() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_BACKEND, _attention)
    AttentionMaskInterface.register(_BACKEND, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The `Attend` owns all masks."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer: [1, H, T, d] in, [1, T, H, d] out."""
    if used := [name for name in _REFUSED if kwargs.get(name) is not None]:
        raise NotSupportedError(f"this model's attention uses {used[0]}, which is not supported")
    if not hasattr(module, "tinkex_attend"):
        raise NotSupportedError("this model's attention does not say which layer it is in")
    q_THd, k_TKd, v_TKd = (t[0].transpose(0, 1) for t in (query, key, value))
    if scaling is not None:
        q_THd = q_THd * (scaling * q_THd.shape[-1] ** 0.5)
    out = module.tinkex_attend(module.layer_idx, q_THd, k_TKd, v_TKd, sliding_window)
    return out.unsqueeze(0), None

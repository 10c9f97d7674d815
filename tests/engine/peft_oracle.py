"""peft on transformers, in float64 or as its users run it: the truth of the training tests."""

from __future__ import annotations

import copy
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from training import save

from tinkex.contract.losses import find_loss, read_settings
from tinkex.engine.train.losses import loss_values


def exact_norms(model: Any) -> Any:
    """Compute norms in the model's own type: transformers' take fp32, whatever the model has.

    On the default model that alone moves gradients of a float64 model by up to 1.3e-5.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_norm, module)
    return model


def _norm(self: Any, x: Tensor) -> Tensor:
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (x * inverse)


def peft_model(base, trainer, folder, adapter_id: str = "a", dtype=torch.float64):
    """The same adapter, loaded by peft from the folder we wrote; in float64 with exact norms."""
    from peft import PeftModel

    if not folder.exists():
        save(trainer, folder, adapter_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn", lambda *a, **k: None)  # peft: tied head carries an adapter
        model = PeftModel.from_pretrained(copy.deepcopy(base), folder, is_trainable=True).to(dtype)
    return exact_norms(model) if dtype == torch.float64 else model


def truth(model, data, loss_fn: str, **settings):
    """Logprobs per datum, the loss and its gradients, by autograd through the peft model."""
    loss = find_loss(loss_fn)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        logits_TV = model(torch.as_tensor(datum.tokens)[None]).logits[0]
        columns = targets if targets.ndim == 2 else targets[:, None]
        logp = logits_TV.log_softmax(-1).gather(1, columns)
        logp = logp if targets.ndim == 2 else logp[:, 0]
        inputs = {
            k: torch.as_tensor(v).double() for k, v in datum.inputs.items() if k != "target_tokens"
        }
        values = loss_values(loss, logp, inputs, read_settings(loss, settings))
        total = total + values.sum()
        logprobs.append(logp.detach())
    model.zero_grad()
    total.backward()
    grads = {name: p.grad.clone() for name, p in adapter_parameters(model)}
    return logprobs, float(total.detach()), grads


def adapter_parameters(model) -> list[tuple[str, Tensor]]:
    """By the names that `training.named_grads` uses."""
    return [
        (name.removeprefix("base_model.model.").removesuffix(".default.weight"), p)
        for name, p in model.named_parameters()
        if "lora_" in name
    ]

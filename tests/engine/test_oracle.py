"""Training equals peft + transformers + torch.optim.

The truth is the peft model in float64; our float32 tensors must lie within 1e-5 of it, relative to
their length as vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from peft_oracle import adapter_parameters, peft_model, truth
from training import FAMILIES, RL, assert_close, distance, job, make, make_data, named_grads, train

from tinkex.contract.optimizers import AdamParams
from tinkex.engine.jobs import OptimJob, TrainDatum

LOSSES = ["cross_entropy", *RL, "kl_divergence"]


def check_against_truth(trainer, model, data, loss_fn: str) -> None:
    logprobs, loss, grads = truth(model, data, loss_fn)
    (result,) = train(trainer, job(data, loss_fn))
    for ours, theirs in zip(result.outputs, logprobs, strict=True):
        assert ours["logprobs"].shape == tuple(theirs.shape)
        assert_close(ours["logprobs"], theirs, "logprobs")
    # The terms of an RL loss cancel, so its sum is only as exact as its tokens.
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5 * result.num_tokens)
    assert result.num_tokens == sum(len(datum.tokens) for datum in data)
    ours = named_grads(trainer)
    assert set(ours) == set(grads)
    for name, grad in grads.items():
        assert_close(ours[name], grad, name)


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_every_loss_and_every_gradient_match_peft(tiny, family, loss_fn, rng, tmp_path):
    """R31: all adapted modules of each family, ragged datums packed in one pass."""
    model = tiny(family)
    trainer = model.trainer(head_rows=10)
    make(trainer)
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    check_against_truth(trainer, oracle, make_data(rng, loss_fn), loss_fn)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "kl_divergence"])
def test_soft_targets_match_peft(tiny, loss_fn, rng, tmp_path):
    """2-D targets: several candidates per position, logprobs in their shape."""
    model = tiny()
    trainer = model.trainer(head_rows=5)
    make(trainer)
    data = []
    for length, width in ((6, 3), (9, 2), (4, 2)):
        scores = rng.normal(size=(length, width))
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        name = "weights" if loss_fn == "cross_entropy" else "logprobs"
        value = p if loss_fn == "cross_entropy" else np.log(p)
        inputs = {
            "target_tokens": rng.integers(0, 97, (length, width)),
            name: value.astype(np.float32),
        }
        data.append(TrainDatum(tokens=rng.integers(0, 97, length), inputs=inputs))
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    check_against_truth(trainer, oracle, tuple(data), loss_fn)


# A large eps keeps the step proportional to the gradient, so that its errors show as they are.
STEP = AdamParams(learning_rate=0.1, eps=1.0, weight_decay=0.1)


def take_torchs_step(oracle) -> torch.Tensor:
    """One step of torch.optim.AdamW; returns the norm of the gradient it used."""
    parameters = [p for p in oracle.parameters() if p.requires_grad]
    torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1).step()
    return torch.nn.utils.get_total_norm([p.grad for p in parameters])


def take_our_step(trainer) -> dict[str, float]:
    return trainer.optim(OptimJob(job_id="", adapter_id="a", params=STEP)).metrics


def named_weights(resident) -> dict[str, torch.Tensor]:
    named = {}
    for part, a_rI, b_Or in resident.adapter.modules():
        named[f"{part.target.module}.lora_A"] = a_rI.detach()
        named[f"{part.target.module}.lora_B"] = b_Or.detach()
    return named


@pytest.mark.parametrize("family", FAMILIES)
def test_one_adamw_step_matches_torch_through_the_model(tiny, family, rng, tmp_path):
    model = tiny(family)
    trainer = model.trainer()
    resident = make(trainer)
    oracle = peft_model(model.truth, trainer, tmp_path / "ck")
    data = make_data(rng)
    truth(oracle, data, "cross_entropy")
    train(trainer, job(data))
    norm, metrics = take_torchs_step(oracle), take_our_step(trainer)
    assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-5)
    ours = named_weights(resident)
    for name, theirs in adapter_parameters(oracle):
        assert_close(ours[name], theirs.detach(), name)


# -------------------------------------------------------------------------------- the default model

TEXTS = [
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer",
    "Water boils at 100 degrees Celsius at sea level.",
]


@dataclass
class World:
    """The default model under one adapter: ours, peft's truth, and peft as its users run it."""

    trainer: Any
    resident: Any
    exact: Any
    usual: Any
    tokens: list[np.ndarray]

    def data(self, loss_fn: str, rng) -> tuple[TrainDatum, ...]:
        """Text; for RL, logprobs of a policy close by, as a sampler would have reported them.

        The slope of k3 is the distance between the policies, so that one is farther away: of a
        small distance, rounding of the logprobs is a large part.
        """
        spread = 1.0 if loss_fn == "kl_divergence" else 0.1
        made = []
        for tokens in self.tokens:
            inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
            if loss_fn == "cross_entropy":
                inputs["weights"] = np.ones(len(tokens) - 1, np.float32)
            else:
                noise = rng.normal(0, spread, len(tokens) - 1)
                inputs["logprobs"] = (self._logprobs(tokens) + noise).astype(np.float32)
                if loss_fn != "kl_divergence":
                    inputs["advantages"] = rng.normal(size=len(tokens) - 1).astype(np.float32)
            made.append(TrainDatum(tokens=tokens[:-1], inputs=inputs))
        return tuple(made)

    @torch.no_grad()
    def _logprobs(self, tokens: np.ndarray) -> np.ndarray:
        logits_TV = self.usual(torch.as_tensor(tokens[:-1])[None]).logits[0]
        return logits_TV.log_softmax(-1).gather(1, torch.as_tensor(tokens[1:, None]))[:, 0].numpy()


@pytest.fixture(scope="module")
def default_world(default_model_dir, tmp_path_factory) -> World:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tinkex.engine.device.backend import load_decoder
    from tinkex.engine.train.trainer import Trainer

    trainer = Trainer(load_decoder(str(default_model_dir)), base_model="default")
    resident = make(trainer, rank=4, noise=0.01)
    base = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("default") / "ck"
    exact, usual = (
        peft_model(base, trainer, folder, dtype=dtype) for dtype in (torch.float64, torch.float32)
    )
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    tokens = [np.array(tokenizer(text).input_ids) for text in TEXTS]
    return World(trainer, resident, exact, usual, tokens)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_default_model_is_trained_as_exactly_as_fp32_can(default_world, loss_fn, rng):
    """R31: logprobs, loss and the whole gradient within 1e-5 of float64.

    A single tensor cannot promise that. Thirty layers carry activations of several hundred beside
    ones of about four; merely storing what the forward pass computes as fp32, with every operation
    in float64, moves the worst tensor by up to 1.6e-5 (dev/LOG.md). So each tensor must be within
    1e-5, or nearer to the truth than peft's own fp32 is.
    """
    world = default_world
    data = world.data(loss_fn, rng)
    logprobs, loss, grads = truth(world.exact, data, loss_fn)
    *_, peers = truth(world.usual, data, loss_fn)
    world.resident.grads.clear()
    (result,) = train(world.trainer, job(data, loss_fn))
    for ours, theirs in zip(result.outputs, logprobs, strict=True):
        assert_close(ours["logprobs"], theirs, "logprobs")
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5 * result.num_tokens)
    ours = named_grads(world.trainer)
    assert set(ours) == set(grads)
    errors = {name: distance(ours[name], grad) for name, grad in grads.items()}
    peer_errors = {name: distance(peers[name], grad) for name, grad in grads.items()}
    whole = distance(joined(ours, grads), joined(grads, grads))
    print(
        f"\n{loss_fn}: whole gradient {whole:.1e} from float64 "
        f"(peft {distance(joined(peers, grads), joined(grads, grads)):.1e}), "
        f"worst tensor {max(errors.values()):.1e} (peft {max(peer_errors.values()):.1e}), "
        f"median {np.median(list(errors.values())):.1e}, "
        f"{sum(e > 1e-5 for e in errors.values())} of {len(errors)} above 1e-5"
    )
    assert whole < 1e-5
    assert np.median(list(errors.values())) < 1e-5
    assert max(errors.values()) < 3e-5
    for name, error in errors.items():
        assert error < max(1e-5, peer_errors[name]), f"{name}: {error:.1e}"


def joined(named, order) -> torch.Tensor:
    return torch.cat([named[name].double().flatten() for name in order])


def test_the_default_model_takes_the_step_that_torch_takes(default_world, rng):
    world = default_world
    data = world.data("cross_entropy", rng)
    truth(world.exact, data, "cross_entropy")
    world.resident.grads.clear()
    train(world.trainer, job(data))
    before = world.resident.adapter.flat.clone()
    norm, metrics = take_torchs_step(world.exact), take_our_step(world.trainer)
    ours = {name: weight.clone() for name, weight in named_weights(world.resident).items()}
    world.resident.adapter.flat.copy_(before)
    assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-5)
    for name, theirs in adapter_parameters(world.exact):
        assert_close(ours[name], theirs.detach(), name)

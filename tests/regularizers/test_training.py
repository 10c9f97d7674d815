"""Custom losses and regularizers move real weights as torch itself would (R21, R22).

A real server trains a tiny Llama; peft and torch autograd on the whole model are the oracle.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_llama import tiny_llama

from tinkex import events
from tinkex.client.service import downloads
from tinkex.client.service.service_client import ServiceClient
from tinkex.client.training.custom_loss import forward_data
from tinkex.errors import BadRequestError, InvalidInputError, RegularizerError, RequestFailedError
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    RegularizerSpec,
)
from tinkex.types import AdamParams, Datum, ModelInput

VOCAB = 61
ADAM = AdamParams(learning_rate=1e-3)
# The first step of Adam is lr * g / (|g| + eps): with the defaults almost the sign of the gradient,
# with both this large the gradient itself.
PLAIN = AdamParams(learning_rate=1e6, eps=1e6)
SEQUENCES = [[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 32, 38, 46, 26], [2, 7, 1, 8, 28]]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(folder, vocab_size=VOCAB, max_position_embeddings=128, initializer_range=0.2)
    return folder


@pytest.fixture(scope="module")
def service(base, tmp_path_factory, start_server):
    folder = tmp_path_factory.mktemp("server")
    with start_server(folder, "--model", str(base), "--device", "cpu") as url:
        with ServiceClient(base_url=url) as client:
            yield client


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return [
        Datum(
            ModelInput.from_ints(tokens[:-1]),
            {
                "target_tokens": tokens[1:],
                "weights": rng.uniform(0.2, 1.0, len(tokens) - 1).astype(np.float32),
                "reference": np.log(rng.uniform(0.05, 0.6, len(tokens) - 1)).astype(np.float32),
                "advantages": rng.normal(size=len(tokens) - 1).astype(np.float32),
            },
        )
        for tokens in SEQUENCES
    ]


@pytest.fixture
def trainer(service, base, data):
    """A client whose adapter has moved away from zero, with a fresh optimizer."""
    first = service.create_lora_training_client(str(base), rank=4, seed=5)
    first.train_step(forward_data(data), "cross_entropy", AdamParams(learning_rate=0.02)).result(
        120
    )
    path = first.save_state("start").result(60).path
    return service.create_training_client_from_state(path)


def adapter(service, client, folder):
    """The adapter's tensors, fetched like any user would."""
    path = client.save_state("now", overwrite=True).result(60).path
    downloads.download_checkpoint(service, path, folder, force=True)
    return load_file(folder / "adapter_model.safetensors")


def logprobs_of(model, data):
    rows = []
    for datum in data:
        tokens = torch.tensor([datum.model_input.to_ints()])
        scores = torch.log_softmax(model(input_ids=tokens).logits[0], dim=-1)
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        rows.append(scores.gather(1, targets[:, None])[:, 0])
    return rows


def in_float64(base, folder):
    """The whole model with the adapter in `folder`, as peft reads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).double()


def step_by_torch(base, folder, data, loss, adam):
    """One Adam step on the adapter in `folder`, by autograd through the whole model."""
    model = in_float64(base, folder)
    total = loss(data, logprobs_of(model, data))
    total.backward()
    moved = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        update = adam.learning_rate * gradient / (gradient.abs() + adam.eps)
        moved[name.replace(".default.", ".")] = (parameter - update).detach()
    return total.item(), moved


def check_moved(before, after, expected, adam):
    """To 1e-5, of the largest gradient where the step is the gradient: it is about 40."""
    assert expected.keys() == after.keys()
    largest = max((expected[name] - before[name]).abs().max().item() for name in after)
    atol = 1e-5 if adam is ADAM else 1e-5 * largest
    for name, tensor in after.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=atol)
    moved = max((after[name] - before[name]).abs().max().item() for name in after)
    assert moved == pytest.approx(largest, rel=1e-5)
    assert moved > 0.9e-3


def base_loss(data, logprobs):
    weights = [d.loss_fn_inputs["weights"].to_torch().to(logprobs[0]) for d in data]
    return -sum((w * x).sum() for w, x in zip(weights, logprobs, strict=True)), {"n": len(data)}


SPECS = [
    RegularizerSpec(L1(), 0.02, "l1"),
    RegularizerSpec(L2(center="mean"), 0.05, "spread"),
    RegularizerSpec(ElasticNet(l1_ratio=0.6), 0.01, "elastic"),
    RegularizerSpec(Entropy(form="per_token"), 0.3, "entropy"),
    RegularizerSpec(KLDivergence(reference="reference", form="per_token"), 0.1, "kl"),
    RegularizerSpec(Consistency(metric="cosine", paired="reference"), 0.2, "consistency"),
    RegularizerSpec(GradientPenalty(target_norm=0.5), 0.4, "slope"),
]


@pytest.mark.parametrize("adam", [ADAM, PLAIN], ids=["adam", "gradient"])
def test_a_regularized_step_changes_the_adapter_as_autograd_on_the_whole_model_would(
    service, base, trainer, data, tmp_path, adam
):
    """R22: weights really move, by base + sum of terms, to 1e-5."""
    before = adapter(service, trainer, tmp_path / "before")

    def whole(batch, logprobs):
        loss, _ = base_loss(batch, logprobs)
        return loss + sum(spec.weight * spec.fn(batch, logprobs)[0] for spec in SPECS)

    expected_loss, expected = step_by_torch(base, tmp_path / "before", data, whole, adam)
    result = trainer.forward_backward_regularized(data, base_loss, SPECS, track_grad_norms=True)
    trainer.optim_step(adam).result(60)
    output, terms = result.result(60)
    check_moved(before, adapter(service, trainer, tmp_path / "after"), expected, adam)
    assert terms.loss_total == pytest.approx(expected_loss, rel=0, abs=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(terms.loss_total)
    assert output.metrics["regularizer/kl:sum"] == terms.regularizers["kl"].value
    assert terms.total_grad_norm > 0
    assert terms.base_loss.metrics == {"n": 3.0}


def test_a_failing_term_applies_nothing_and_leaves_the_client_usable(
    service, trainer, data, tmp_path
):
    """R22: nothing half-applied; the error names the term."""
    before = adapter(service, trainer, tmp_path / "before")

    def broken(batch, logprobs):
        raise ValueError("no reference today")

    specs = [RegularizerSpec(L1(), 0.1), RegularizerSpec(broken, 1.0, "mine")]
    with pytest.raises(RegularizerError, match="'mine'.*no reference today"):
        trainer.forward_backward_regularized(data, "cross_entropy", specs)
    trainer.optim_step(ADAM).result(60)
    after = adapter(service, trainer, tmp_path / "after")
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name])
    assert trainer.forward(forward_data(data), "cross_entropy").result(60).metrics["loss:sum"] > 0


async def test_the_async_twin_trains_the_same(trainer, data):
    seen = []
    end = events.subscribe(seen.append)
    future = await trainer.forward_backward_regularized_async(data, "cross_entropy", SPECS[:2])
    output, terms = await future
    end()
    assert output.metrics["base_loss:sum"] == terms.base_loss.value
    names = {e.fields.get("regularizer") for e in seen if e.name == "regularizer.compute.stop"}
    assert names == {"base", "l1", "spread"}


# ----------------------------------------------------------------------------------- custom losses


def clipped(logprobs, reference, advantages):
    ratio = torch.exp(logprobs - reference)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -surrogate.sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/clipped:sum": ((ratio < 0.8) | (ratio > 1.2)).float().sum(),
    }


@pytest.fixture(scope="module")
def traced(service):
    ranks = {"logprobs": 1, "reference": 1, "advantages": 1}
    handle = service.create_custom_loss(clipped, ranks).result(60)
    assert handle.loss_id is not None
    return handle


@pytest.mark.parametrize("adam", [ADAM, PLAIN], ids=["adam", "gradient"])
def test_a_traced_loss_in_one_pass_equals_two_passes_here(
    service, base, traced, data, tmp_path, adam
):
    """R21: results and weights agree within 1e-6; `loss:sum` is the custom loss both times.

    So do the logprobs after an ordinary step; a step as long as the gradient itself magnifies the
    last bits of the weights, which are compared there.
    """
    answers = []
    for loss in (traced, replace(traced, loss_id=None)):
        client = service.create_lora_training_client(str(base), rank=4, seed=5)
        out = client.forward_backward_custom(data, loss).result(60)
        client.optim_step(adam).result(60)
        weights = adapter(service, client, tmp_path / "after")
        after = [row.detach() for row in logprobs_of(in_float64(base, tmp_path / "after"), data)]
        answers.append((out.metrics, weights, after))
    (ours, weights, after), (theirs, their_weights, their_after) = answers
    for name in ("loss:sum", "custom/ratio:mean", "custom/clipped:sum"):
        assert ours[name] == pytest.approx(theirs[name], rel=0, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, their_weights[name], rtol=0, atol=1e-6)
    if adam is ADAM:
        for row, their_row in zip(after, their_after, strict=True):
            torch.testing.assert_close(row, their_row, rtol=0, atol=1e-6)


def distillation(logprobs, teacher):
    """Forward KL from a teacher over the candidates of each position."""
    probability = teacher.exp()
    kl = (probability * (teacher - logprobs)).sum()
    return kl, {"custom/kl:sum": kl, "custom/agreement:mean": (logprobs - teacher).abs().mean()}


def test_a_traced_loss_over_candidates_equals_two_passes_here(service, base):
    """R21 with 2-D targets: several candidates per position."""
    rng = np.random.default_rng(1)
    data = [
        Datum(
            ModelInput.from_ints(tokens),
            {
                "target_tokens": rng.integers(0, VOCAB, (len(tokens), 3)),
                "teacher": np.log(rng.dirichlet(np.ones(3), len(tokens))).astype(np.float32),
            },
        )
        for tokens in SEQUENCES
    ]
    handle = service.create_custom_loss(distillation, {"logprobs": 2, "teacher": 2}).result(60)
    answers = []
    for loss in (handle, replace(handle, loss_id=None)):
        client = service.create_lora_training_client(str(base), rank=4, seed=5)
        out = client.forward_backward_custom(data, loss).result(60)
        step = client.optim_step(ADAM).result(60)
        answers.append((out.metrics, step.metrics, out.loss_fn_outputs[0]["logprobs"].to_numpy()))
    (ours, our_step, ours_lp), (theirs, their_step, theirs_lp) = answers
    for name in ("loss:sum", "custom/kl:sum", "custom/agreement:mean"):
        assert ours[name] == pytest.approx(theirs[name], rel=0, abs=1e-6)
    assert our_step["grad_norm:mean"] == pytest.approx(their_step["grad_norm:mean"], rel=1e-5)
    assert ours_lp.shape == (len(SEQUENCES[0]), 3)
    np.testing.assert_allclose(ours_lp, theirs_lp, rtol=0, atol=1e-6)


@pytest.mark.parametrize("adam", [ADAM, PLAIN], ids=["adam", "gradient"])
def test_a_custom_loss_moves_the_adapter_as_autograd_would(
    service, base, trainer, data, tmp_path, adam
):
    """R21: any torch callable, to 1e-5."""

    def loss(batch, logprobs):
        return torch.logsumexp(torch.cat(list(logprobs)) ** 2, 0), {}

    before = adapter(service, trainer, tmp_path / "before")
    total, expected = step_by_torch(
        base, tmp_path / "before", data, lambda d, x: loss(d, x)[0], adam
    )
    out = trainer.forward_backward_custom(data, loss)
    trainer.optim_step(adam).result(60)
    check_moved(before, adapter(service, trainer, tmp_path / "after"), expected, adam)
    assert out.result().metrics["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_the_server_refuses_what_is_not_in_its_list_by_the_nodes_name(service):
    """R21: tracing allows any torch function; running strangers' code does not."""

    def noisy(logprobs):
        return (logprobs + torch.rand_like(logprobs)).sum(), {}

    with pytest.raises((BadRequestError, RequestFailedError), match="node 'rand_like'.*rand_like"):
        service.create_custom_loss(noisy, {"logprobs": 1}).result(60)


def test_a_traced_loss_that_fails_on_the_data_leaves_the_client_usable(service, base, data):
    def mismatched(logprobs, reference):
        return (logprobs[1:] * reference).sum(), {}

    handle = service.create_custom_loss(mismatched, {"logprobs": 1, "reference": 1}).result(60)
    client = service.create_lora_training_client(str(base), rank=4, seed=5)
    with pytest.raises((RequestFailedError, InvalidInputError), match="node 'mul'"):
        client.forward_backward_custom(data, handle).result(60)
    assert client.train_step(forward_data(data), "cross_entropy", ADAM).result(60).loss > 0

"""Custom losses on the client's side: the surrogate batch, and tracing (R21)."""

from __future__ import annotations

import os
import subprocess
from functools import partial

import numpy as np
import pytest
import torch

from tinkex.client.training import custom_loss
from tinkex.client.training.loss_tracing import (
    check_loss_inputs,
    encode_graph,
    run_handle,
    trace_loss,
)
from tinkex.errors import InvalidInputError
from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.data.provenance import SampledProvenanceSpan
from tinkex.types.data.tensor_data import TensorData
from tinkex.types.training.forward_backward import ForwardBackwardOutput


def datum(num_tokens=3, **inputs):
    tokens = list(range(num_tokens))
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, **inputs})


def floats(*values):
    return TensorData.from_numpy(np.array(values, np.float32))


LOGPROBS = [floats(-0.5, -1.0, -2.0), floats(-0.1, -0.2)]
DATA = [datum(3, weights=[1.0, 0.0, 1.0]), datum(2)]


def squares(data, logprobs):
    return sum((x**2).sum() for x in logprobs), {"num": len(data)}


# ------------------------------------------------------------------------------ surrogate flow


def test_the_forward_batch_has_targets_and_weights_only():
    """Contract 5.6, step 1: given weights are kept, others are zeros, nothing else is sent."""
    data = [datum(3, weights=[1.0, 0.5, 0.0], advantages=[1.0, 2.0, 3.0]), datum(2)]
    first, second = custom_loss.forward_data(data)
    assert sorted(first.loss_fn_inputs) == ["target_tokens", "weights"]
    assert first.loss_fn_inputs["weights"].tolist() == [1.0, 0.5, 0.0]
    assert second.loss_fn_inputs["weights"].tolist() == [0.0, 0.0]


def test_surrogate_weights_are_minus_the_gradient():
    made = custom_loss.surrogate(squares, DATA, LOGPROBS)
    assert made.loss == pytest.approx(5.30, abs=1e-6)
    assert made.metrics == {"num": 2.0}
    for sent, logprobs in zip(made.data, LOGPROBS, strict=True):
        expected = -2 * logprobs.to_numpy()
        np.testing.assert_allclose(sent.loss_fn_inputs["weights"].to_numpy(), expected, rtol=1e-6)


def test_the_surrogate_has_the_same_gradient_with_respect_to_a_model():
    """The point of it all: cross-entropy with these weights trains like the custom loss."""
    torch.manual_seed(0)
    weight = torch.randn(5, 3, requires_grad=True)
    features = torch.randn(3, 5)

    def model():
        return torch.log_softmax(features @ weight, -1)[:, 0]

    (direct,) = torch.autograd.grad((model() ** 2).sum() + model().exp().sum(), weight)
    made = custom_loss.surrogate(
        lambda data, lps: ((lps[0] ** 2).sum() + lps[0].exp().sum(), {}),
        [datum(3)],
        [TensorData.from_torch(model().detach())],
    )
    weights = made.data[0].loss_fn_inputs["weights"].to_torch()
    (ours,) = torch.autograd.grad((-model() * weights).sum(), weight)
    torch.testing.assert_close(ours, direct, rtol=1e-5, atol=1e-6)


def test_sparse_targets_get_sparse_weights_of_the_same_cells():
    targets = TensorData([5, 6, 7], "int64", [2, 4], [0, 2, 3], [0, 3, 1])
    data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": targets})]
    (sent,) = custom_loss.forward_data(data)
    assert sent.loss_fn_inputs["weights"].sparse_col_indices == [0, 3, 1]
    dense = TensorData.from_numpy(-np.arange(1, 9, dtype=np.float32).reshape(2, 4))
    made = custom_loss.surrogate(squares, data, [dense])
    weights = made.data[0].loss_fn_inputs["weights"]
    assert weights.data == [2.0, 8.0, 12.0]
    assert weights.shape == [2, 4]


def test_provenance_travels_with_the_surrogate():
    spans = [SampledProvenanceSpan(sequence_id="s", length=2)]
    data = [datum(2).with_provenance(spans, spans)]
    made = custom_loss.surrogate(squares, data, [LOGPROBS[1]])
    assert made.data[0].model_input_spans == spans
    assert custom_loss.forward_data(data)[0].loss_fn_input_spans == spans


def test_the_answer_carries_the_users_loss_and_the_surrogates():
    """Contract 5.6, step 5."""
    made = custom_loss.Surrogate(2.5, {"mine:sum": 3.0}, [])
    output = ForwardBackwardOutput("x", [], {"loss:sum": 9.0, "tokens:sum": 4.0})
    assert custom_loss.finish(output, made).metrics == {
        "tokens:sum": 4.0,
        "mine:sum": 3.0,
        "loss:sum": 2.5,
        "surrogate_loss:sum": 9.0,
    }
    with pytest.raises(KeyError, match="loss:sum"):
        custom_loss.finish(ForwardBackwardOutput("x", [], {}), made)


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (lambda d, lp: lp[0].sum() + lp[1].sum(), "must return (loss, metrics), got Tensor"),
        (lambda d, lp: (lp[0].sum(), {}, 3), "got tuple of length 3"),
        (lambda d, lp: (1.0, {}), "must be a torch tensor, got float"),
        (lambda d, lp: (lp[0], {}), "must be a scalar, got shape (3,)"),
        (lambda d, lp: (lp[0].sum().detach(), {}), "is detached"),
        (lambda d, lp: (lp[0].sum() * float("nan"), {}), "is nan"),
        (lambda d, lp: ((-lp[0]).sqrt().sum() + torch.log(lp[1] * 0).sum(), {}), "is -inf"),
        (lambda d, lp: (lp[0].sum(), {}), "logprobs[1]: the loss does not depend"),
        (
            lambda d, lp: ((lp[0] * 0).sqrt().sum() + lp[1].sum(), {}),
            "logprobs[0]: the gradient has 3",
        ),
        (lambda d, lp: (lp[0].sum() + lp[1].sum(), [1]), "metrics of <lambda> must be a dict"),
        (lambda d, lp: (lp[0].sum() + lp[1].sum(), {"a": "x"}), "metric 'a'"),
        (lambda d, lp: (lp[0].sum() + lp[1].sum(), {"a": lp[0]}), "must be one number"),
        (lambda d, lp: (lp[0].sum() + lp[1].sum(), {1: 1.0}), "names of <lambda> must be strings"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_has_its_own_error(fn, word):
    with pytest.raises(InvalidInputError) as caught:
        custom_loss.surrogate(fn, DATA, LOGPROBS)
    assert word in str(caught.value)


def test_what_the_loss_itself_raises_passes_through():
    def broken(data, logprobs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        custom_loss.surrogate(broken, DATA, LOGPROBS)


def test_a_datum_without_targets_and_an_empty_batch_are_refused():
    bare = Datum(ModelInput.from_ints([1]), {"weights": [1.0]})
    with pytest.raises(InvalidInputError, match=r"data\[1\].*needs target_tokens"):
        custom_loss.forward_data([datum(1), bare])
    with pytest.raises(InvalidInputError, match="empty"):
        custom_loss.forward_data([])


def test_a_server_without_logprobs_is_named():
    output = ForwardBackwardOutput("x", [{"logprobs": LOGPROBS[0]}, {}], {})
    with pytest.raises(InvalidInputError, match="output 1 without"):
        custom_loss.output_logprobs(output, 2)
    with pytest.raises(InvalidInputError, match="2 outputs"):
        custom_loss.output_logprobs(
            ForwardBackwardOutput("x", [{"logprobs": LOGPROBS[0]}] * 2, {}), 3
        )


# ------------------------------------------------------------------------------------- tracing


def weighted(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:mean": loss, "custom/weight:sum": weights.sum()}


RANKS = {"logprobs": 1, "weights": 1}


def test_a_handle_run_here_sums_losses_and_reduces_metrics_by_their_suffix():
    """Contract 5.7, flag off."""
    handle = trace_loss(weighted, RANKS, "s")
    data = [datum(3, weights=[1.0, 0.0, 1.0]), datum(2, weights=[2.0, 2.0])]
    made = custom_loss.surrogate(partial(run_handle, handle), data, LOGPROBS)
    assert made.loss == pytest.approx(2.5 + 0.6, abs=1e-6)
    assert made.metrics == pytest.approx({"custom/loss:mean": 1.55, "custom/weight:sum": 6.0})
    np.testing.assert_allclose(made.data[1].loss_fn_inputs["weights"].to_numpy(), [2.0, 2.0])


def test_a_graph_is_plain_data_in_the_shape_of_the_contract():
    """Contract 5.7."""
    handle = trace_loss(weighted, RANKS, "s")
    nodes = encode_graph(handle)["nodes"]
    assert [n["op"] for n in nodes[:2]] == ["placeholder", "placeholder"]
    assert nodes[2] == {
        "op": "call_function",
        "name": "mul",
        "target": "operator.mul",
        "args": [{"ref": "logprobs"}, {"ref": "weights"}],
        "kwargs": {},
    }
    assert nodes[-1]["args"] == [
        {
            "tuple": [
                {"ref": "neg"},
                {
                    "dict": {
                        "custom/loss:mean": {"ref": "neg"},
                        "custom/weight:sum": {"ref": "sum_2"},
                    }
                },
            ]
        }
    ]
    assert handle.input_names == ("logprobs", "weights")


def test_equal_losses_have_equal_keys_and_other_losses_have_others():
    def same(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/loss:mean": loss, "custom/weight:sum": weights.sum()}

    def other(logprobs, weights):
        return -(logprobs * weights).sum(), {}

    keys = [trace_loss(fn, RANKS, "s").key for fn in (weighted, same, other)]
    assert keys[0] == keys[1] != keys[2]


def _os_system(logprobs):
    os.system("touch /tmp/tinkex-traced-loss-ran")
    return logprobs.sum(), {}


def _helper_with_effects(x):
    subprocess.run(["touch", "/tmp/tinkex-traced-loss-ran"], check=True)
    return x


def _through_a_helper(logprobs):
    return _helper_with_effects(logprobs).sum(), {}


def _imports_inside(logprobs):
    import socket

    return logprobs.sum() * socket.AF_INET, {}


def _opens_a_file(logprobs):
    open("/tmp/tinkex-traced-loss-ran", "w").close()
    return logprobs.sum(), {}


CAPTURED = torch.ones(3)


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (_os_system, "uses 'os'"),
        (_through_a_helper, "uses 'subprocess'"),
        (_imports_inside, "uses 'socket'"),
        (_opens_a_file, "uses 'open'"),
        (lambda logprobs: ((logprobs * CAPTURED).sum(), {}), "captures a tensor"),
        (lambda logprobs: (logprobs.sum().item(), {}), ".item()"),
        (lambda logprobs: (logprobs.sum().frobnicate(), {}), "tensors do not have"),
        (lambda logprobs: (logprobs.sum() if logprobs.sum() > 0 else 0, {}), "torch.where"),
        (lambda logprobs: logprobs.sum(), "must return (loss, dict of metrics)"),
        (lambda logprobs: (1.0, {}), "must return a tensor as its loss"),
        (lambda logprobs: (logprobs.sum(), {"x": logprobs.sum()}), "custom/NAME:sum"),
        (lambda logprobs: (logprobs.sum(), {"custom/x:sum": 1.0}), "must be a tensor, got 1.0"),
        (lambda x: (x.sum(), {}), "must take logprobs first"),
        (lambda logprobs, k=1: (logprobs.sum(), {}), "may not have a default"),
        (lambda logprobs, *rest: (logprobs.sum(), {}), "*args"),
        (lambda logprobs, A: (logprobs.sum(), {}), "parameter 'A' must match"),
        (lambda logprobs, extra: (logprobs.sum(), {}), "input_ranks must too"),
    ],
)
def test_a_loss_that_cannot_be_written_down_is_refused_before_it_runs(fn, word):
    """R21: os.system and friends are found by name, so that tracing never executes them."""
    with pytest.raises(InvalidInputError) as caught:
        trace_loss(fn, {"logprobs": 1}, "s")
    assert word in str(caught.value)
    assert not os.path.exists("/tmp/tinkex-traced-loss-ran")


@pytest.mark.parametrize("ranks", [{"logprobs": 0}, {"logprobs": 3}])
def test_ranks_outside_the_contract_are_refused(ranks):
    with pytest.raises(InvalidInputError, match="input_ranks"):
        trace_loss(lambda logprobs: (logprobs.sum(), {}), ranks, "s")


def test_a_batch_that_lacks_an_input_is_refused_by_datum_and_name():
    handle = trace_loss(weighted, RANKS, "s")
    with pytest.raises(InvalidInputError, match=r"data\[1\]\.loss_fn_inputs\.weights"):
        check_loss_inputs(handle, [datum(1, weights=[1.0]), datum(1)])
    flat = datum(2, weights=np.ones((2, 2), np.float32))
    with pytest.raises(InvalidInputError, match="traced for rank 1, got rank 2"):
        check_loss_inputs(handle, [flat])

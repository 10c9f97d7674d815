"""Traced custom losses rebuilt by the engine (R21)."""

from __future__ import annotations

import math
import operator
import random
import subprocess
import sys

import pytest
import torch
from traced_graphs import (
    CASES,
    LAST,
    custom,
    example_inputs,
    node,
    over_the_wire,
    random_graph,
    ref,
)

from tinkex.client.training.loss_tracing import _qualified
from tinkex.engine.jobs import TracedLoss
from tinkex.engine.metrics import reduce_metrics
from tinkex.engine.train import graph_ops
from tinkex.engine.train.graph import build_loss
from tinkex.engine.train.graph_program import MAX_NODES, check_graph
from tinkex.errors import InvalidInputError, NotSupportedError


@pytest.mark.parametrize(("fn", "ranks"), CASES)
def test_a_rebuilt_loss_equals_the_function_and_its_gradient(fn, ranks):
    """R21: what the server runs is what the user wrote, to 1e-6."""
    inputs = example_inputs(ranks)
    expected, expected_metrics = fn(*inputs.values())
    loss, metrics = build_loss(over_the_wire(fn, ranks))(inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {k: float(v.detach()) for k, v in expected_metrics.items()}
    )
    ours, theirs = (torch.autograd.grad(x, inputs["logprobs"])[0] for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("fn", "ranks"), CASES)
def test_a_rebuilt_loss_has_the_gradient_of_finite_differences(fn, ranks):
    inputs = {k: v.detach().double() for k, v in example_inputs(ranks, seed=3).items()}
    rebuilt = build_loss(over_the_wire(fn, ranks))

    def value(logprobs):
        return rebuilt({**inputs, "logprobs": logprobs})[0]

    assert torch.autograd.gradcheck(value, inputs["logprobs"].requires_grad_(True))


def test_metrics_of_datums_add_up_or_average_as_their_name_says():
    per_datum = [
        {"custom/a:sum": 1.0, "custom/b:mean": 1.0},
        {"custom/a:sum": 2.0, "custom/b:mean": 4.0},
    ]
    assert reduce_metrics(per_datum) == {"custom/a:sum": 3.0, "custom/b:mean": 2.5}
    assert reduce_metrics([]) == {}


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (node("call_function", "evil", "os.system", "true"), "os.system"),
        (node("call_function", "evil", "torch.load", "/etc/passwd"), "torch.load"),
        (node("call_function", "evil", "torch.os.system", "true"), "torch.os.system"),
        (node("call_function", "evil", "builtins.eval", "1"), "builtins.eval"),
        (node("call_function", "evil", "operator.methodcaller", "x"), "operator.methodcaller"),
        (node("call_function", "evil", "torch.rand_like", ref("logprobs")), "rand_like"),
        (node("call_function", "evil", "torch.autograd.grad", ref("logprobs")), "autograd"),
        (node("call_function", "evil", "getattr", ref("logprobs"), "__class__"), "__class__"),
        (node("call_function", "evil", "getattr", ref("logprobs"), "grad_fn"), "grad_fn"),
        (node("call_method", "evil", "__reduce__", ref("logprobs")), "__reduce__"),
        (node("call_method", "evil", "item", ref("logprobs")), "item"),
        (node("call_method", "evil", "register_hook", ref("logprobs")), "register_hook"),
        (node("call_method", "evil", "add_", ref("logprobs"), 1), "add_"),
        (node("call_method", "evil", "half", ref("logprobs")), "half"),
        (node("get_attr", "evil", "weight"), "get_attr"),
        (node("call_module", "evil", "linear", ref("logprobs")), "call_module"),
        (node("call_function", "evil", "torch.exp", ref("logprobs"), out=ref("logprobs")), "out="),
        (
            node(
                "call_function", "evil", "torch.nn.functional.relu", ref("logprobs"), inplace=True
            ),
            "place",
        ),
        (node("call_method", "evil", "to", ref("logprobs"), {"dtype": "bfloat16"}), "bfloat16"),
    ],
)
def test_what_is_not_in_the_list_is_refused_by_the_nodes_name(bad, word):
    """R21: a traced loss that calls os.system, opens files or reaches into objects."""
    with pytest.raises(NotSupportedError, match=r"node 'evil'") as caught:
        build_loss(custom(bad, node("call_method", "last", "sum", ref("logprobs"))))
    assert word in str(caught.value)


def test_every_listed_name_exists_in_torch():
    for name in graph_ops.FUNCTIONS | {f"torch.Tensor.{m}" for m in graph_ops.METHODS}:
        last = node("call_function", "last", name, ref("logprobs"))
        if name.startswith("torch.Tensor."):
            last = node("call_method", "last", name.rpartition(".")[2], ref("logprobs"))
        elif name == "getattr":
            last["args"].append("shape")
        build_loss(custom(last))


def test_a_listed_function_is_still_listed_under_the_name_that_tracing_gives_it():
    roots = {"torch": torch, "operator": operator, "math": math}
    for name in graph_ops.FUNCTIONS - {"getattr"}:
        root, _, path = name.partition(".")
        traced = _qualified(operator.attrgetter(path)(roots[root]))
        assert graph_ops.canonical(traced) in graph_ops.FUNCTIONS, (name, traced)


@pytest.mark.parametrize(
    ("nodes", "word"),
    [
        ([node("call_method", "big", "expand", ref("logprobs"), 10**9, -1)], "elements"),
        ([node("call_method", "big", "repeat", ref("logprobs"), 10**9)], "elements"),
        ([node("call_function", "big", "torch.zeros", 10**10)], "elements"),
        ([node("call_function", "big", "torch.arange", 10**12)], "elements"),
        ([node("call_function", "big", "torch.eye", 10**5)], "elements"),
        ([node("call_function", "big", "torch.full", [10**5, 10**5], 1.0)], "elements"),
        (
            [node("call_function", "big", "torch.nn.functional.pad", ref("logprobs"), [0, 10**10])],
            "elements",
        ),
        (
            [
                node("call_function", "none", "torch.zeros", 0, 2**30),
                node("call_function", "big", "torch.sum", ref("none"), 0),
            ],
            "would make",
        ),
        (
            [
                node("call_function", "none", "torch.zeros", 2**13, 0),
                node("call_function", "big", "torch.inner", ref("none"), ref("none")),
            ],
            "would make",
        ),
        ([node("call_function", "big", "operator.pow", 10, 10**9)], "power"),
        ([node("call_function", "big", "operator.mul", 2**62, 2**62)], "64 bits"),
        ([node("call_function", "big", "operator.mul", [0], 10**10)], "takes tensors and numbers"),
        (
            [node("call_function", "big", "operator.mod", "%99999999999d", ref("logprobs"))],
            "takes tensors",
        ),
        (
            [
                node("call_function", "a", "torch.arange", 5000),
                node("call_method", "b", "unsqueeze", ref("a"), 1),
                node("call_function", "big", "operator.mul", ref("a"), ref("b")),
            ],
            "elements",
        ),
        (
            [
                node("call_function", "a", "torch.zeros", 2**24),
                *[node("call_function", f"b{i}", "torch.exp", ref("a")) for i in range(2)],
                node("call_function", "b2", "torch.exp", ref("a")),
                node("call_function", "big", "torch.exp", ref("a")),
            ],
            "made over",
        ),
        (
            [
                node("call_function", "a", "torch.zeros", 1, 2, 2048, 128),
                node("call_function", "b", "torch.zeros", 1024, 2, 128, 1),
                node("call_function", "big", "torch.matmul", ref("a"), ref("b")),
            ],
            "copy an operand to 536870912 elements",
        ),
        (
            [
                node("call_method", "a", "sum", ref("logprobs")),
                node("call_method", "b", "expand", ref("a"), 4096, 1),
                node("call_function", "c", "torch.ones", 1, 4096),
                node("call_function", "big", "torch.nn.functional.l1_loss", ref("b"), ref("c")),
            ],
            "made over",
        ),
        (
            [
                node("call_function", "a", "torch.zeros", 2**22),
                node("call_function", "big", "torch.argsort", ref("a")),
            ],
            "operations in one step",
        ),
    ],
)
def test_a_loss_that_allocates_without_bound_is_refused_before_it_does(nodes, word):
    """R21: refused with the node's name, without taking the memory first."""
    fn = build_loss(custom(*nodes, node("call_method", "last", "sum", ref("logprobs"))))
    with pytest.raises(InvalidInputError, match="node 'big'") as caught:
        fn({"logprobs": torch.zeros(4, requires_grad=True)})
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "norm",
    [
        node("call_function", "n", "torch.linalg.norm", ref("x"), 2),
        node("call_function", "n", "torch.linalg.norm", ref("x"), ord={"float": "nan"}),
        node("call_function", "n", "torch.linalg.norm", ref("x"), "nuc", [0, 1]),
        node("call_function", "n", "torch.norm", ref("x"), p="nuc"),
        node("call_method", "n", "norm", ref("x"), "nuc"),
    ],
)
def test_a_norm_that_decomposes_a_matrix_is_refused(norm):
    """Its work is the cube of a side, in one step that nothing interrupts."""
    fn = build_loss(custom(node("call_function", "x", "torch.ones", 8, 8), norm, LAST))
    with pytest.raises(NotSupportedError, match="matrix norm"):
        fn({"logprobs": torch.zeros(4, requires_grad=True)})


@pytest.mark.parametrize(
    "norm",
    [
        node("call_method", "n", "norm", ref("x")),
        node("call_function", "n", "torch.norm", ref("x"), 2),
        node("call_function", "n", "torch.linalg.norm", ref("x")),
        node("call_function", "n", "torch.linalg.norm", ref("x"), "fro"),
        node("call_function", "n", "torch.linalg.norm", ref("x"), 2, 1),
    ],
)
def test_other_norms_are_computed(norm):
    last = node("call_method", "last", "sum", ref("logprobs"))
    fn = build_loss(custom(node("call_function", "x", "torch.ones", 8, 8), norm, last))
    fn({"logprobs": torch.zeros(4, requires_grad=True)})


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (custom(LAST, node("call_method", "last", "sum", ref("logprobs"))), "used twice"),
        (
            custom(node("call_method", "last", "sum", ref("later"))),
            "'later', which is not an earlier",
        ),
        (custom(node("call_method", "last", "sum", {"ref": "logprobs", "x": 1})), "cannot read"),
        (
            custom(node("call_method", "last", "sum", ref("logprobs"), {"pickle": "x"})),
            "cannot read",
        ),
        (
            custom(
                *[node("call_method", f"n{i}", "sum", ref("logprobs")) for i in range(MAX_NODES)]
            ),
            "nodes",
        ),
        (custom(node("call_method", "last", "sum", ref("logprobs"), [0] * 30_000)), "values"),
        (custom(LAST, metrics={"loss": ref("last")}), "metric 'loss' must match"),
        (custom(LAST, metrics={"custom/a:sum": 1.0}), "must be a tensor"),
        (custom(LAST, inputs=(("weights", 1),)), "first input must be 'logprobs'"),
        (custom(LAST, inputs=(("logprobs", 3),)), "rank 3"),
        (TracedLoss(inputs=(("logprobs", 1),), graph={"format": 2, "nodes": []}), "format 1"),
        (
            TracedLoss(inputs=(("logprobs", 1),), graph={"format": 1, "nodes": [1, 2]}),
            "a node is an object",
        ),
    ],
)
def test_a_malformed_graph_says_what_is_wrong(loss, word):
    with pytest.raises(InvalidInputError) as caught:
        check_graph(loss)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "inputs", "word"),
    [
        ([node("call_method", "last", "exp", ref("logprobs"))], {}, "one floating point number"),
        (
            [node("call_method", "d", "detach", ref("logprobs")),
             node("call_method", "last", "sum", ref("d"))],
            {},
            "does not depend on logprobs",
        ),
        (
            [node("call_function", "s", "operator.mul", ref("logprobs"), {"float": "nan"}),
             node("call_method", "last", "sum", ref("s"))],
            {},
            "the loss is nan",
        ),
        (
            [node("call_function", "s", "operator.add", ref("logprobs"), ref("extra")),
             node("call_method", "last", "sum", ref("s"))],
            {"extra": torch.zeros(3)},
            "node 's': operator.add failed",
        ),
        ([LAST], {"logprobs": torch.zeros(2, 2)}, "traced for rank 1"),
    ],
)  # fmt: skip
def test_a_loss_that_fails_on_the_data_says_where(nodes, inputs, word):
    names = (("logprobs", 1),) + ((("extra", 1),) if "extra" in inputs else ())
    fn = build_loss(custom(*nodes, inputs=names))
    with pytest.raises(InvalidInputError) as caught:
        fn({"logprobs": torch.zeros(4, requires_grad=True), **inputs})
    assert word in str(caught.value)


def test_a_missing_input_names_what_the_datum_has():
    fn = build_loss(custom(LAST, inputs=(("logprobs", 1), ("extra", 1))))
    with pytest.raises(
        InvalidInputError, match=r"reads 'extra', and the datum has only \['logprobs'\]"
    ):
        fn({"logprobs": torch.zeros(2)})


def test_a_forward_only_pass_needs_no_gradient():
    loss, _ = build_loss(custom(LAST))({"logprobs": torch.ones(3)})
    assert float(loss) == 3.0


@pytest.mark.filterwarnings("ignore")
def test_whatever_is_sent_ends_in_a_loss_or_in_a_refusal():
    """R21: 3,000 random graphs; no other exception, no hang, no memory."""
    num_losses = 0
    for seed in range(3000):
        loss = random_graph(random.Random(seed))
        shape = (7,) if loss.inputs[0][1] == 1 else (7, 3)
        generator = torch.Generator().manual_seed(seed)
        inputs = {
            "logprobs": torch.randn(shape, generator=generator).requires_grad_(True),
            "a": torch.randn(7, generator=generator),
            "b": torch.randn(7, 3, generator=generator),
            "c": torch.tensor(2.0),
        }
        try:
            build_loss(loss)(inputs)
            num_losses += 1
        except InvalidInputError as exc:
            assert "custom loss node" in str(exc)  # noqa: PT017
    assert num_losses > 0


def test_a_graph_is_refused_without_torch():
    """An API process refuses a bad graph and never loads a tensor library."""
    code = (
        "import sys; from tinkex.engine.train.graph_program import check_graph; "
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)

"""The work of traced losses: known before they run, bounded, done in turns (R21)."""

from __future__ import annotations

import random
import time

import numpy as np
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

from tinkex.contract import traced
from tinkex.engine.jobs import TrainDatum
from tinkex.engine.train.graph import build_loss
from tinkex.engine.train.graph_cost import LossBudget
from tinkex.engine.train.graph_program import check_graph
from tinkex.engine.train.graph_shapes import _datum_operations, check_work
from tinkex.errors import InvalidInputError


def counted(loss, inputs) -> tuple[int, int]:
    """Operations by the shapes of the inputs alone, and as the engine counts them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    before, _ = _datum_operations(check_graph(loss), shapes)
    budget = LossBudget()
    build_loss(loss, budget)(inputs)
    return before, budget._operations


@pytest.mark.parametrize(("fn", "ranks"), CASES)
def test_the_work_of_a_loss_is_known_before_it_runs(fn, ranks):
    before, after = counted(over_the_wire(fn, ranks), example_inputs(ranks))
    assert 0.5 * after < before <= after


@pytest.mark.filterwarnings("ignore")
def test_what_is_counted_from_shapes_is_never_more_than_what_runs():
    """A request that the engine would take is not refused by a wrong guess of a shape."""
    num_known = 0
    for seed in range(3000):
        loss = random_graph(random.Random(seed))
        shape = (7,) if loss.inputs[0][1] == 1 else (7, 3)
        inputs = {
            "logprobs": torch.ones(shape).requires_grad_(True),
            "a": torch.ones(7),
            "b": torch.ones(7, 3),
            "c": torch.tensor(2.0),
        }
        try:
            before, after = counted(loss, inputs)
        except InvalidInputError:
            continue
        assert before <= after, seed
        num_known += before == after
    assert num_known > 5


def heavy(step, count, *made):
    """`count` times the same step on what `made` makes, beside the logprobs."""
    steps = [{**step, "name": f"n{i}"} for i in range(count)]
    return custom(*made, *steps, node("call_method", "last", "sum", ref("logprobs")))


PRODUCTS = heavy(
    node("call_function", "", "torch.matmul", ref("x"), ref("y")),
    30,
    node("call_function", "x", "torch.ones", 1024, 8192),
    node("call_function", "y", "torch.ones", 8192, 1024),
)
SINES = heavy(
    node("call_function", "", "torch.sin", ref("x")),
    12,
    node("call_function", "x", "torch.ones", 2**22, dtype={"dtype": "float64"}),
)
SLICES = heavy(
    node("call_function", "", "operator.getitem", ref("x"), 0),
    1000,
    node("call_function", "x", "torch.ones", 2**24),
)


def pairs(num_tokens, count):
    tokens = np.ones(num_tokens, np.int64)
    return [TrainDatum(tokens=tokens, inputs={"target_tokens": tokens})] * count


@pytest.mark.parametrize(
    ("loss", "count", "heaviest"),
    [(PRODUCTS, 1, "n0"), (SINES, 64, "n0"), (SLICES, 1, "x")],
    ids=["products", "sines", "slices"],
)
def test_a_loss_of_too_much_work_is_refused_by_its_shapes(loss, count, heaviest):
    with pytest.raises(InvalidInputError) as caught:
        check_work(loss, pairs(2, count))
    told = str(caught.value)
    assert f"most of them in node {heaviest!r}" in told
    assert str(traced.DATUM_OPERATIONS) in told
    assert str(traced.request_limit(2 * count)) in told


def test_the_engine_counts_what_shapes_alone_do_not_tell():
    """A mask hides the size of what follows; the step that is too much is never run."""
    loss = custom(
        node("call_function", "x", "torch.ones", 2**22),
        node("call_function", "mask", "operator.gt", ref("x"), 0),
        node("call_function", "hidden", "operator.getitem", ref("x"), ref("mask")),
        *[node("call_function", f"n{i}", "torch.argmax", ref("hidden")) for i in range(1000)],
        node("call_method", "last", "sum", ref("logprobs")),
    )
    check_work(loss, pairs(2, 1))
    budget = LossBudget(max_operations=2**29)
    with pytest.raises(InvalidInputError, match=r"node 'n\d+'.* operations for the request, over"):
        build_loss(loss, budget)({"logprobs": torch.ones(2).requires_grad_(True)})


@pytest.mark.parametrize(("fn", "ranks"), CASES)
def test_honest_losses_stay_far_below_the_limits(fn, ranks):
    """128 datums of 32,768 tokens, twenty candidates each where there are several."""
    loss = over_the_wire(fn, ranks)
    shapes = {1: (32_768,), 2: (32_768, 20)}
    inputs = {name: shapes[rank] for name, rank in ranks.items()}
    work, _ = _datum_operations(check_graph(loss), inputs)
    assert work < traced.DATUM_OPERATIONS / 4
    assert 128 * work < traced.request_limit(128 * 32_768) / 4


def test_others_have_turns_between_the_steps_of_a_loss_and_of_its_backward():
    steps = [
        node("call_method", f"n{i}", "mul", ref(f"n{i - 1}" if i else "logprobs"), 1.5)
        for i in range(6)
    ]
    loss = custom(*steps, node("call_method", "last", "sum", ref("n5")))
    turns = []
    budget = LossBudget(give_turn=lambda: turns.append(torch.is_grad_enabled()))
    logprobs = torch.ones(2).requires_grad_(True)
    value, _ = build_loss(loss, budget)({"logprobs": logprobs})
    assert len(turns) == 7
    (slope,) = torch.autograd.grad(value, logprobs)
    assert slope.tolist() == [1.5**6] * 2
    assert len(turns) == 14


def test_a_backward_is_ended_by_its_seconds_too():
    budget = LossBudget()
    loss = custom(
        node("call_method", "n", "exp", ref("logprobs")),
        node("call_method", "last", "sum", ref("n")),
    )
    logprobs = torch.ones(2).requires_grad_(True)
    value, _ = build_loss(loss, budget)({"logprobs": logprobs})
    budget.datum_s = 0.0
    with pytest.raises(InvalidInputError, match="the backward to sum ended"):
        torch.autograd.grad(value, logprobs)


def test_what_others_do_between_steps_is_not_counted():
    budget = LossBudget(datum_s=2.5, give_turn=lambda: time.sleep(1.0))
    steps = [node("call_method", f"n{i}", "exp", ref("logprobs")) for i in range(3)]
    loss = custom(*steps, node("call_method", "last", "sum", ref("logprobs")))
    build_loss(loss, budget)({"logprobs": torch.ones(2).requires_grad_(True)})


def test_a_slice_counts_the_same_before_it_runs():
    """An index by a number is a view; an index by a tensor is not."""
    loss = custom(
        node("call_function", "x", "torch.ones", 2**16),
        node("call_function", "n", "operator.getitem", ref("x"), 0),
        LAST,
    )
    before, after = counted(loss, {"logprobs": torch.ones(2).requires_grad_(True)})
    assert before == after < 4 * 2**16

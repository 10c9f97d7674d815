"""Traced losses for tests: of the kind that people write, by hand, and random ones."""

from __future__ import annotations

import json
import math
import random

import torch

from tinkex.client.training.loss_tracing import encode_graph, trace_loss
from tinkex.engine.jobs import TracedLoss
from tinkex.engine.train import graph_ops

F = torch.nn.functional


def clipped(logprobs, old_logprobs, advantages):
    """A PPO-like loss with most of what people write: ratios, clamps, masks, means, shapes."""
    ratio = torch.exp(logprobs - old_logprobs)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    mask = advantages != 0
    entropy = -(logprobs.exp() * logprobs).mean()
    loss = -surrogate.sum() + 0.01 * entropy + F.softplus(ratio)[mask].mean() / ratio.shape[0]
    return loss, {
        "custom/ratio:mean": ratio.mean(),
        "custom/clipped:sum": ((ratio < 0.8) | (ratio > 1.2)).sum(),
    }


def kl_and_smooth(logprobs, reference):
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    smooth = ((logprobs[1:] - logprobs[:-1]) ** 2).sum()
    weights = torch.arange(logprobs.shape[0], dtype=torch.float32) / math.sqrt(2.0)
    top = torch.topk(logprobs, k=2).values.sum() + logprobs.max(dim=0)[0]
    norm = torch.linalg.norm(logprobs) + torch.special.xlogy(weights + 1, weights + 1).sum()
    return kl + smooth + (weights * logprobs).sum() + top + norm, {}


def soft_targets(logprobs, weights):
    rows = torch.logsumexp(logprobs + weights.clamp(min=float("-inf")), dim=-1)
    cosine = F.cosine_similarity(logprobs, weights + 1.0, dim=0).sum()
    return -rows.sum() + torch.where(logprobs > -1.0, logprobs, 0.0).sum() + cosine, {}


CASES = [
    (clipped, {"logprobs": 1, "old_logprobs": 1, "advantages": 1}),
    (kl_and_smooth, {"logprobs": 1, "reference": 1}),
    (soft_targets, {"logprobs": 2, "weights": 2}),
]


def over_the_wire(fn, ranks) -> TracedLoss:
    handle = trace_loss(fn, ranks, "session")
    graph = json.loads(json.dumps(encode_graph(handle), allow_nan=False))
    return TracedLoss(inputs=tuple((i.name, i.rank) for i in handle.inputs), graph=graph)


def example_inputs(ranks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {1: (7,), 2: (7, 3)}
    tensors = {k: -torch.rand(shapes[r], generator=generator) * 2 for k, r in ranks.items()}
    tensors["logprobs"].requires_grad_(True)
    return tensors


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name):
    return {"ref": name}


def custom(*nodes, inputs=(("logprobs", 1),), output="last", metrics=None):
    """A graph over `logprobs` whose output is the node called `output`."""
    placeholders = [node("placeholder", name, name) for name, _ in inputs]
    end = node("output", "output", "output", {"tuple": [ref(output), {"dict": metrics or {}}]})
    return TracedLoss(inputs=inputs, graph={"format": 1, "nodes": [*placeholders, *nodes, end]})


LAST = node("call_method", "last", "sum", ref("logprobs"))


ODD_VALUES = [
    0, 1, -1, 10**6, 10**9, 0.5, -1e30, {"float": "inf"}, {"float": "nan"}, None, True, "mean",
    "%99999999d", {"slice": [None, None, None]}, {"slice": [1, None, 2]}, {"ellipsis": True},
    {"dtype": "int64"}, {"device": "cuda:7"}, [], [0, 1], {"tuple": []}, {"tuple": [None, -1]},
]  # fmt: skip


FUNCTIONS, METHODS = sorted(graph_ops.FUNCTIONS), sorted(graph_ops.METHODS)


def random_graph(rng: random.Random) -> TracedLoss:
    """Listed operations on whatever: what a stranger might send."""
    inputs = (("logprobs", rng.choice((1, 2))), ("a", 1), ("b", 2), ("c", 0))
    names, nodes = [name for name, _ in inputs], []

    def value():
        return ref(rng.choice(names)) if rng.random() < 0.6 else rng.choice(ODD_VALUES)

    for index in range(rng.randint(1, 8)):
        op, pool = rng.choice([("call_function", FUNCTIONS), ("call_method", METHODS)])
        target = rng.choice(pool)
        args = [value() for _ in range(rng.randint(1, 3))]
        kwargs = (
            {rng.choice(("dim", "keepdim", "min", "size", "k")): value()}
            if rng.random() < 0.2
            else {}
        )
        if target == "getattr":
            args, kwargs = [ref(rng.choice(names)), rng.choice(("shape", "T", "values"))], {}
        nodes.append(node(op, f"n{index}", target, *args, **kwargs))
        names.append(f"n{index}")
    last = node("call_method", "last", "sum", ref(names[-1]))
    return custom(*nodes, last, inputs=inputs)

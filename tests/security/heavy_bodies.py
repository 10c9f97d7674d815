"""Requests of much work in few bytes: sparse tensors and traced losses, as JSON."""

from __future__ import annotations

from typing import Any


def sparse_tensor(columns: int, dtype: str, value: float) -> dict[str, Any]:
    """Two rows of so many columns with one value in them."""
    return {
        "data": [value],
        "dtype": dtype,
        "shape": [2, columns],
        "sparse_crow_indices": [0, 1, 1],
        "sparse_col_indices": [0],
    }


def datum(**inputs: dict[str, Any]) -> dict[str, Any]:
    """Two tokens, with these inputs of the loss beside dense targets."""
    targets = {"data": [1, 2], "dtype": "int64", "shape": [2]}
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}]
    return {
        "model_input": {"chunks": chunks},
        "loss_fn_inputs": {"target_tokens": targets} | inputs,
    }


def sparse_datum(columns: int, **inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with sparse targets."""
    return datum(target_tokens=sparse_tensor(columns, "int64", 1), **inputs)


def sparse_request(model: str, seq_id: int, columns: int, count: int = 1) -> dict[str, Any]:
    weights = sparse_tensor(columns, "float32", 1.0)
    data = [sparse_datum(columns, weights=weights) for _ in range(count)]
    given = {"data": data, "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": given}


def call(name: str, target: str, *args: Any) -> dict[str, Any]:
    """A step of a traced loss; texts among its arguments are names of other steps."""
    values = [{"ref": arg} if isinstance(arg, str) else arg for arg in args]
    return {"op": "call_function", "name": name, "target": target, "args": values}


def traced(inputs: list[tuple[str, int]], nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """A traced loss: placeholders for its inputs, the given steps, and the output of `loss`."""
    places = [{"op": "placeholder", "name": name, "target": name} for name, _ in inputs]
    output = {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [{"tuple": [{"ref": "loss"}, {"dict": {}}]}],
    }
    return {
        "name": "heavy",
        "inputs": [{"name": name, "rank": rank} for name, rank in inputs],
        "graph": {"format": 1, "nodes": [*places, *nodes, output]},
    }


def product_loss(count: int, columns: int) -> dict[str, Any]:
    """A traced loss of so many products of [1024, columns] and [columns, 1024]."""
    nodes = [
        call("x", "torch.ones", 1024, columns),
        call("y", "torch.ones", columns, 1024),
        *(call(f"n{i}", "torch.matmul", "x", "y") for i in range(count)),
        call("loss", "torch.sum", "logprobs"),
    ]
    return traced([("logprobs", 1)], nodes)

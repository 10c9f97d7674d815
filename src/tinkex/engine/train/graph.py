"""Run a traced custom loss (contract 5.7) on one datum at a time.

`build_loss` makes the function that the trainer calls inside its forward-backward pass, from the
steps that `graph_program` read.

Before a step that could grow runs, its output size is computed on shapes alone; a step past the
limits is refused, so a loss cannot take the worker's memory. Its work is counted from the same
shapes; between steps, forward and backward, the clock is looked at and others have turns
(`graph_cost`). The trainer knows how to sum over datums; this module only ever sees one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.engine.jobs import TracedLoss
from tinkex.engine.train import graph_ops as ops
from tinkex.engine.train.graph_cost import LossBudget, step_operations
from tinkex.engine.train.graph_program import (
    MAX_INTEGER,
    NamedConstant,
    NodeRef,
    Program,
    Step,
    bad_node,
    check_graph,
    unsupported_node,
)
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

    LossFunction = Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]

MAX_NODE_ELEMENTS = 2**24
"""Most elements in the output of one step, for one datum."""
MAX_TOTAL_ELEMENTS = 2**26
"""Most elements in all outputs together, for one datum: autograd keeps them until the backward."""


def build_loss(custom: TracedLoss, budget: LossBudget | None = None) -> LossFunction:
    """Return `fn(inputs of one datum) -> (scalar loss, metrics)` for a graph that passes.

    All datums share the budget; without one only the operations of each are bounded.

    The inputs are dense tensors by name, all on one device; `logprobs` may require a gradient. Sum
    the losses over the datums of a request and reduce metrics with `reduce_metrics`.

    Raises:
        InvalidInputError: Here for a bad graph, and from the returned function for inputs of
            the wrong rank, a step that fails or grows too large, and a loss that is not a finite
            scalar or does not depend on `logprobs`.
    """
    program = check_graph(custom)
    steps = tuple((step, _resolve(step)) for step in program.steps)
    costs = budget or LossBudget()

    def loss(inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return _run(program, steps, inputs, costs)

    return loss


def _resolve(step: Step) -> Callable[..., Any]:
    import torch

    if step.op == "call_method":
        return getattr(torch.Tensor, step.target)  # type: ignore[no-any-return]
    if step.target == "getattr":
        return getattr
    # The name is in the allow-list, so every part of it is one we wrote down.
    root, *parts = step.target.split(".")
    value: Any = {"torch": torch, "operator": operator, "math": math}[root]
    for part in parts:
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _run(
    program: Program,
    steps: Sequence[tuple[Step, Callable[..., Any]]],
    inputs: Mapping[str, Tensor],
    budget: LossBudget,
) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    budget.begin()
    values: dict[str, Any] = _bind_inputs(program, inputs)
    device = values["logprobs"].device
    total = 0
    for step, fn in steps:
        args = _fill(step.args, values, device)
        kwargs = _fill(step.kwargs, values, device)
        if step.target in ops.FACTORIES:
            kwargs["device"] = device
        try:
            size = _check_growth(step, fn, args, kwargs)
            kept = _kept(step, args, kwargs, size)
            _check_total(step, total + kept)
            budget.spend(step.name, step.target, _operations(step, args, kwargs, size))
            value = _call(step, fn, args, kwargs)
        except (InvalidInputError, torch.OutOfMemoryError):
            raise  # The trainer knows what to do when memory runs out.
        except Exception as exc:  # Whatever torch makes of a stranger's arguments is their error.
            message = str(exc).splitlines()[0][:300] if str(exc) else type(exc).__name__
            raise bad_node(step.name, f"{step.target} failed: {message}") from exc
        total += max(_check_value(step, value), kept)
        _check_total(step, total)
        values[step.name] = value
        _watch_backward(step, value, budget)
        budget.between(step.name, step.target)
    return _check_answer(program, values)


def _watch_backward(step: Step, value: Any, budget: LossBudget) -> None:
    """Come back to the budget when the backward reaches what a step made.

    On a CPU, where a step may take seconds, autograd runs in the thread that called it, which is
    the one that may give a turn. A device has threads of autograd's own, and is not waited for.
    """

    def reached(_: Tensor) -> None:
        budget.between(step.name, f"the backward to {step.target}")

    for tensor in _tensors(value):
        if tensor.requires_grad and tensor.device.type == "cpu":
            tensor.register_hook(reached)


def _call(step: Step, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run one step; one that indexes runs on the CPU, where a bad index is only an error.

    On CUDA it is a failed assertion in a kernel, after which the process cannot use the device any
    more: one user's index would end every user's work.
    """
    if step.target.rpartition(".")[2] not in ops.INDEXING:
        return fn(*args, **kwargs)
    tensors = _tensors((args, kwargs))
    if not tensors or tensors[0].device.type == "cpu":
        return fn(*args, **kwargs)
    value = fn(*_move(args, "cpu"), **_move(kwargs, "cpu"))
    return _move(value, tensors[0].device)


def _bind_inputs(program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    bound: dict[str, Any] = {}
    for name, rank in program.inputs:
        if name not in inputs:
            raise InvalidInputError(
                f"the custom loss reads {name!r}, and the datum has only {sorted(inputs)}.",
                path=f"loss_fn_inputs.{name}",
            )
        if inputs[name].dim() != rank:
            raise InvalidInputError(
                f"the custom loss was traced for rank {rank}, got shape "
                f"{tuple(inputs[name].shape)}.",
                path=f"loss_fn_inputs.{name}",
            )
        bound[name] = inputs[name]
    return bound


def _fill(value: Any, values: Mapping[str, Any], device: Any) -> Any:
    """Put real values where an argument refers to a node or a torch constant."""
    if isinstance(value, NodeRef):
        return values[value.node]
    if isinstance(value, NamedConstant):
        import torch

        return device if value.kind == "device" else getattr(torch, value.name)
    if isinstance(value, slice):
        return slice(
            *(_fill(part, values, device) for part in (value.start, value.stop, value.step))
        )
    if isinstance(value, tuple | list):
        return type(value)(_fill(item, values, device) for item in value)
    if isinstance(value, Mapping):
        return {key: _fill(item, values, device) for key, item in value.items()}
    return value


# ------------------------------------------------------------------------------------- the limits


def _check_growth(
    step: Step, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """Refuse a step whose output would be too large, before it is made; gives a bound of it."""
    if step.target == "getattr":
        return 0
    tensors = _tensors((args, kwargs))
    short_name = step.target.rpartition(".")[2]
    # Python's operators grow what is no tensor too: [0] * 10**9 and 10 ** 10**9 know no shape.
    if step.target.startswith(("operator.", "math.")) and short_name != "getitem":
        _check_operands(step, args)
    if not tensors and step.target not in ops.FACTORIES:
        return 0
    if short_name == "norm":
        _check_norm(step, args, kwargs)
    if short_name in ops.BROADCASTS:
        size = _broadcast_size(tensors)
    elif short_name in ops.CONCATENATES:
        size = sum(t.numel() for t in tensors)
    elif short_name in ops.MULTIPLIES:
        size = math.prod(_extent(t.shape) for t in tensors)
    elif short_name == "matmul" and (copied := _copied_size(tensors)) > MAX_NODE_ELEMENTS:
        raise bad_node(
            step.name,
            f"{step.target} would copy an operand to {copied} elements, over {MAX_NODE_ELEMENTS}",
        )
    elif short_name == "getitem" and any(_is_mask(t) for t in tensors[1:]):
        # How much a mask selects depends on its values, which a tensor without contents has not.
        _check_mask(step, args)
        return 0  # no more than there is
    else:
        # Without their contents: operations on such tensors compute shapes only.
        shadow_args, shadow_kwargs = _move(args, "meta"), _move(kwargs, "meta")
        if step.target in ops.FACTORIES:
            shadow_kwargs["device"] = "meta"
        size = sum(t.numel() for t in _tensors(fn(*shadow_args, **shadow_kwargs)))
    if size > MAX_NODE_ELEMENTS:
        raise bad_node(
            step.name, f"{step.target} would make {size} elements, over {MAX_NODE_ELEMENTS}"
        )
    return size


def _operations(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> int:
    shapes = [tuple(tensor.shape) for tensor in _tensors((args, kwargs))]
    name = step.target.rpartition(".")[2]
    return step_operations(name, shapes, size, indexes=bool(_tensors(list(args[1:]))))


def _check_total(step: Step, total: int) -> None:
    if total > MAX_TOTAL_ELEMENTS:
        raise bad_node(step.name, f"the loss has made over {MAX_TOTAL_ELEMENTS} elements by here")


def _kept(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> int:
    """Elements that a step may leave behind for the backward, in no output of it."""
    name = step.target.rpartition(".")[2]
    if name == "matmul":
        return size + _copied_size(_tensors((args, kwargs)))
    return ops.KEPT * size if name in ops.KEEPS else 0


def _copied_size(tensors: Sequence[Tensor]) -> int:
    """Elements of the copies that a product makes of operands whose batch is stretched."""
    batches = [tuple(t.shape[:-2]) for t in tensors if t.dim() > 1]
    if len(batches) < 2 or len(set(batches)) < 2:
        return 0
    batch = math.prod(np.broadcast_shapes(*batches))
    sizes = [batch * math.prod(t.shape[-2:]) for t in tensors]
    return sum(size for size, t in zip(sizes, tensors, strict=True) if size > t.numel())


def _is_mask(tensor: Tensor) -> bool:
    return str(tensor.dtype) == "torch.bool"


def _broadcast_size(tensors: Sequence[Tensor]) -> int:
    """Elements of the shape that all operands stretch to: no output of such a step has more."""
    shapes = {tuple(t.shape) for t in tensors if t.dim()}
    if len(shapes) <= 1:
        return _extent(next(iter(shapes), ()))
    return _extent(np.broadcast_shapes(*shapes))


def _extent(shape: Sequence[int]) -> int:
    """Elements of a shape, an empty dimension counted as one.

    A sum over the empty dimension of [0, 2^30] has 2^30 elements, and so have products over it.
    """
    return math.prod(max(size, 1) for size in shape)


def _check_mask(step: Step, args: Sequence[Any]) -> None:
    """A boolean mask selects at most what is there, unless other indices multiply it."""
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    if sum(bool(_tensors(part)) for part in parts) > 1 or any(part is None for part in parts):
        raise unsupported_node(step.name, "mixes a boolean mask with other index tensors")


def _check_norm(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A norm of vectors takes one look at each element; some of a matrix need its decomposition."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    is_of_matrices = dim is None or (isinstance(dim, tuple | list) and len(dim) > 1)
    if isinstance(order, str):
        is_cheap = order == "fro"
    elif step.target == "torch.linalg.norm" and is_of_matrices and args and args[0].dim() > 1:
        is_cheap = order is None or (isinstance(order, int | float) and abs(order) in (1, math.inf))
    else:
        is_cheap = True
    if not is_cheap:
        raise unsupported_node(step.name, f"computes the matrix norm {str(order)[:40]!r}")


def _check_operands(step: Step, args: Sequence[Any]) -> None:
    """Python operators take tensors and numbers only: no repeated lists, no formatted strings."""
    import torch

    if not all(isinstance(arg, torch.Tensor | int | float) for arg in args):
        kinds = [type(arg).__name__ for arg in args]
        raise bad_node(step.name, f"{step.target} takes tensors and numbers, got {kinds}")
    if step.target == "operator.pow" and isinstance(args[1], int) and abs(args[1]) > 1024:
        raise bad_node(step.name, f"the power {args[1]} is too large")


def _check_value(step: Step, value: Any) -> int:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise bad_node(step.name, "an integer does not fit 64 bits")
    return sum(t.numel() for t in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, slice):
        return _tensors((value.start, value.stop, value.step))
    return []


def _move(value: Any, device: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return (value.detach() if device == "meta" else value).to(device)
    if isinstance(value, torch.device):
        return torch.device(device)
    if type(value) in (tuple, list):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    return value


def _check_answer(program: Program, values: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    import torch

    loss, name = values[program.loss.node], program.loss.node
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise bad_node(name, f"the loss must be one floating point number, got {shape}; sum it")
    if values["logprobs"].requires_grad and not loss.requires_grad:
        raise bad_node(
            name, "the loss does not depend on logprobs (detached?), so nothing would train"
        )
    if not torch.isfinite(loss):
        raise bad_node(name, f"the loss is {loss.item()}; check for log of zero or overflow")
    metrics = {}
    for key, ref in program.metrics.items():
        value = values[ref.node]
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise bad_node(ref.node, f"metric {key!r} must be one number")
        metrics[key] = value.detach().reshape(())
    return loss, metrics

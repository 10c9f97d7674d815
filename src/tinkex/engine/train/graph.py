"""Rebuild a traced custom loss (contract 5.7) and run it on one datum at a time.

A graph arrives as JSON from a stranger. `check_graph` turns it into a list of steps, each an
operation of the allow-list in `graph_ops` on the results of earlier steps; it needs no torch. Then
`build_loss` makes the function that the trainer calls inside its forward-backward pass. Nothing is
evaluated as code and nothing is unpickled: a name that is not in the list is refused, and the
refusal names the node.

Before a step that could grow runs, its output size is computed on shapes alone; a step past the
limits is refused, so a loss cannot take the worker's memory. Its work is counted from the same
shapes; between steps, forward and backward, the clock is looked at and others have turns
(`graph_cost`). The trainer knows how to sum over datums; this module only ever sees one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.contract.losses import CUSTOM_INPUT, CUSTOM_METRIC, MAX_CUSTOM_INPUTS
from tinkex.engine.jobs import TracedLoss
from tinkex.engine.train import graph_ops as ops
from tinkex.engine.train.graph_cost import LossBudget, step_operations
from tinkex.errors import InvalidInputError, NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor

    LossFunction = Callable[[Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]

MAX_NODES = 1024
MAX_VALUES = 20_000
"""JSON values in all arguments of a graph together."""
MAX_DEPTH = 8
MAX_NODE_ELEMENTS = 2**24
"""Most elements in the output of one step, for one datum."""
MAX_TOTAL_ELEMENTS = 2**26
"""Most elements in all outputs together, for one datum: autograd keeps them until the backward."""
MAX_INTEGER = 2**63

_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


# ----------------------------------------------------------------------------- from JSON to steps


@dataclass(frozen=True, slots=True)
class NodeRef:
    node: str


@dataclass(frozen=True, slots=True)
class _Named:
    """A torch constant by kind and name; `device` becomes the device the engine runs on."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    op: str
    """`call_function` or `call_method`."""
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A checked graph. The last values named are the answer."""

    inputs: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    loss: NodeRef
    metrics: Mapping[str, NodeRef]


def check_graph(custom: TracedLoss) -> Program:
    """Parse a graph, or refuse it with the name of the node that is wrong. Needs no torch.

    Raises:
        NotSupportedError: A node uses an operation outside the allow-list.
        InvalidInputError: The graph is malformed or too large.
    """
    inputs = _check_inputs(custom.inputs)
    nodes = _check_nodes(custom.graph)
    placeholders = [n["target"] for n in nodes if n["op"] == "placeholder"]
    if placeholders != [name for name, _ in inputs]:
        raise InvalidInputError(
            f"the placeholders {placeholders} differ from the inputs {[n for n, _ in inputs]}; "
            "trace the loss again.",
            path="graph.nodes",
        )
    decoder = _Decoder()
    steps = []
    for node in nodes[:-1]:
        if node["op"] != "placeholder":
            steps.append(_parse_step(node, decoder))
        decoder.known.add(node["name"])
    loss, metrics = _parse_output(nodes[-1], decoder)
    return Program(inputs, tuple(steps), loss, metrics)


def _check_inputs(inputs: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    names = [name for name, _ in inputs]
    if not names or names[0] != "logprobs":
        raise InvalidInputError(
            f"the first input must be 'logprobs', got {names[:1]}.", path="inputs"
        )
    if len(names) > MAX_CUSTOM_INPUTS or len(set(names)) != len(names):
        raise InvalidInputError(
            f"a loss takes at most {MAX_CUSTOM_INPUTS} distinct inputs, got {len(names)}: "
            f"{names[:20]}.",
            path="inputs",
        )
    for name, rank in inputs:
        if not CUSTOM_INPUT.fullmatch(name) or rank not in (0, 1, 2):
            raise InvalidInputError(
                f"input {name[:80]!r} of rank {rank!r} is not allowed; names match "
                f"{CUSTOM_INPUT.pattern} and ranks are 0, 1 or 2.",
                path="inputs",
            )
    if inputs[0][1] not in (1, 2):
        raise InvalidInputError(f"logprobs has rank 1 or 2, got {inputs[0][1]}.", path="inputs")
    return tuple((name, rank) for name, rank in inputs)


def _check_nodes(graph: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not isinstance(graph, Mapping) or graph.get("format") != 1:
        raise InvalidInputError("a graph is an object with format 1 and nodes.", path="graph")
    nodes = graph.get("nodes")
    if not isinstance(nodes, list | tuple) or not 2 <= len(nodes) <= MAX_NODES:
        count = len(nodes) if isinstance(nodes, list | tuple) else "no"
        raise InvalidInputError(
            f"a graph has 2 to {MAX_NODES} nodes, this one has {count}.", path="graph.nodes"
        )
    seen: set[str] = set()
    started = False
    for index, node in enumerate(nodes):
        name = _check_node(node, index)
        last = index == len(nodes) - 1
        started = started or node["op"] != "placeholder"
        if name in seen:
            raise _bad(name, "the name is used twice")
        if (node["op"] == "output") != last:
            raise _bad(name, "exactly one output node must end the graph")
        if started and node["op"] == "placeholder":
            raise _bad(name, "placeholders come before every other node")
        seen.add(name)
    return list(nodes)


def _check_node(node: Any, index: int) -> str:
    well_formed = (
        isinstance(node, Mapping)
        and isinstance(node.get("name"), str)
        and isinstance(node.get("op"), str)
        and isinstance(node.get("target"), str)
        and isinstance(node.get("args", ()), list | tuple)
        and isinstance(node.get("kwargs", {}), Mapping)
        and _NODE_NAME.fullmatch(node["name"])
    )
    if not well_formed:
        raise InvalidInputError(
            "a node is an object with op, name, target, args and kwargs.",
            path=f"graph.nodes[{index}]",
        )
    return str(node["name"])


def _parse_step(node: Mapping[str, Any], decoder: _Decoder) -> Step:
    name, op = node["name"], node["op"]
    if op == "call_function":
        target = ops.canonical(node["target"])
        if target not in ops.FUNCTIONS:
            raise _unsupported(name, f"calls the function {target[:100]!r}")
    elif op == "call_method":
        target = node["target"]
        if target not in ops.METHODS:
            raise _unsupported(name, f"calls the tensor method {target[:100]!r}")
    else:
        raise _unsupported(name, f"is a {op[:40]!r} node; a loss may not hold tensors or modules")
    args = tuple(decoder.decode(name, value) for value in node.get("args", ()))
    kwargs = {key: decoder.decode(name, value) for key, value in node.get("kwargs", {}).items()}
    if bad := ops.FORBIDDEN_KEYWORDS & kwargs.keys():
        raise _unsupported(name, f"passes {sorted(bad)[0]}=")
    if kwargs.get("inplace"):
        raise _unsupported(name, "works in place")
    if target == "to":  # A device by name: the engine's own is the only one there is.
        args = tuple(_Named("device", arg) if isinstance(arg, str) else arg for arg in args)
    if target == "getattr" and (
        len(args) != 2 or kwargs or not isinstance(args[1], str) or args[1] not in ops.ATTRIBUTES
    ):
        raise _unsupported(name, f"reads the attribute {args[1:]!r}")
    return Step(name, op, target, args, kwargs)


def _parse_output(node: Mapping[str, Any], decoder: _Decoder) -> tuple[NodeRef, dict[str, NodeRef]]:
    values = [decoder.decode(node["name"], value) for value in node.get("args", ())]
    pair = values[0] if len(values) == 1 else None
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict)):
        raise _bad(node["name"], "the output must be one tuple (loss, metrics)")
    loss, metrics = pair
    if not isinstance(loss, NodeRef):
        raise _bad(node["name"], f"the loss must be a tensor, got {loss!r}")
    for key, value in metrics.items():
        if not CUSTOM_METRIC.fullmatch(key):
            raise _bad(node["name"], f"metric {key[:80]!r} must match {CUSTOM_METRIC.pattern}")
        if not isinstance(value, NodeRef):
            raise _bad(node["name"], f"metric {key!r} must be a tensor, got {value!r}")
    return loss, metrics


class _Decoder:
    """Argument values of one graph: counts them, and knows which nodes came before."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._left = MAX_VALUES

    def decode(self, node: str, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise _bad(node, f"the arguments hold over {MAX_VALUES} values or {MAX_DEPTH} levels")
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
            raise _bad(node, "an integer does not fit 64 bits")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self.decode(node, item, depth + 1) for item in value]
        if isinstance(value, Mapping) and len(value) == 1:
            return self._decode_tagged(node, *next(iter(value.items())), depth)
        raise _bad(node, f"cannot read the argument {str(value)[:80]}")

    def _decode_tagged(self, node: str, tag: str, value: Any, depth: int) -> Any:
        if tag == "ref":
            if value not in self.known:
                raise _bad(node, f"refers to {str(value)[:80]!r}, which is not an earlier node")
            return NodeRef(value)
        if tag == "tuple" and isinstance(value, list | tuple):
            return tuple(self.decode(node, item, depth + 1) for item in value)
        if tag == "dict" and isinstance(value, Mapping):
            return {str(k): self.decode(node, item, depth + 1) for k, item in value.items()}
        if tag == "slice" and isinstance(value, list | tuple) and len(value) == 3:
            return slice(*(self.decode(node, item, depth + 1) for item in value))
        if tag == "ellipsis" and value is True:
            return ...
        if tag == "float" and value in _FLOATS:
            return _FLOATS[value]
        if tag == "device" and isinstance(value, str):
            return _Named("device", value)
        named = {"dtype": ops.DTYPES, "layout": ops.LAYOUTS, "memory_format": ops.MEMORY_FORMATS}
        if tag in named:
            if value not in named[tag]:
                raise _unsupported(node, f"uses the {tag} {str(value)[:40]!r}")
            return _Named(tag, value)
        raise _bad(node, f"cannot read the argument {{{tag[:40]!r}: ...}}")


def _bad(node: str, what: str) -> InvalidInputError:
    return InvalidInputError(f"{what}.", path=f"custom loss node {node!r}")


def _unsupported(node: str, what: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what}, which losses run by the server may not use (see docs/custom-losses.md). "
        "Pass the function itself to forward_backward_custom to run it on your side.",
        path=f"custom loss node {node!r}",
    )


# ---------------------------------------------------------------------------- from steps to torch


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
            raise _bad(step.name, f"{step.target} failed: {message}") from exc
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
    if isinstance(value, _Named):
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
        raise _bad(
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
        raise _bad(step.name, f"{step.target} would make {size} elements, over {MAX_NODE_ELEMENTS}")
    return size


def _operations(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> int:
    shapes = [tuple(tensor.shape) for tensor in _tensors((args, kwargs))]
    name = step.target.rpartition(".")[2]
    return step_operations(name, shapes, size, indexes=bool(_tensors(list(args[1:]))))


def _check_total(step: Step, total: int) -> None:
    if total > MAX_TOTAL_ELEMENTS:
        raise _bad(step.name, f"the loss has made over {MAX_TOTAL_ELEMENTS} elements by here")


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
        raise _unsupported(step.name, "mixes a boolean mask with other index tensors")


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
        raise _unsupported(step.name, f"computes the matrix norm {str(order)[:40]!r}")


def _check_operands(step: Step, args: Sequence[Any]) -> None:
    """Python operators take tensors and numbers only: no repeated lists, no formatted strings."""
    import torch

    if not all(isinstance(arg, torch.Tensor | int | float) for arg in args):
        kinds = [type(arg).__name__ for arg in args]
        raise _bad(step.name, f"{step.target} takes tensors and numbers, got {kinds}")
    if step.target == "operator.pow" and isinstance(args[1], int) and abs(args[1]) > 1024:
        raise _bad(step.name, f"the power {args[1]} is too large")


def _check_value(step: Step, value: Any) -> int:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise _bad(step.name, "an integer does not fit 64 bits")
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
        raise _bad(name, f"the loss must be one floating point number, got {shape}; sum it")
    if values["logprobs"].requires_grad and not loss.requires_grad:
        raise _bad(name, "the loss does not depend on logprobs (detached?), so nothing would train")
    if not torch.isfinite(loss):
        raise _bad(name, f"the loss is {loss.item()}; check for log of zero or overflow")
    metrics = {}
    for key, ref in program.metrics.items():
        value = values[ref.node]
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise _bad(ref.node, f"metric {key!r} must be one number")
        metrics[key] = value.detach().reshape(())
    return loss, metrics

"""Refuse a traced loss that is too much work, from shapes alone, before any of it is done.

Needs no torch: a server counts when a request is accepted. It follows shapes through the steps
whose rule is written here and leaves the others at zero, so that it never counts more than the
engine, which knows every shape and counts again as it goes. The limits are `contract.traced`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkex.contract import traced
from tinkex.engine.jobs import TracedLoss, TrainDatum
from tinkex.engine.numerics.arrays import form_of
from tinkex.engine.train import graph_ops as ops
from tinkex.engine.train.graph_cost import Shape, step_operations
from tinkex.engine.train.graph_program import NodeRef, Program, Step, check_graph
from tinkex.errors import InvalidInputError

MAX_COUNTED_STEPS = 4096
"""Steps that a server follows for one request, over its datums of different shapes."""
MAX_COUNTED_SHAPES = 16


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: Shape

    def __post_init__(self) -> None:
        sizes_are_sane = all(type(size) is int and 0 <= size <= 2**63 for size in self.shape)
        if len(self.shape) > 32 or not sizes_are_sane:
            raise _UnknownShapeError


class _UnknownShapeError(Exception):
    """A step without a rule here, or one that the engine will refuse."""


def check_work(custom: TracedLoss, data: Sequence[TrainDatum]) -> None:
    """Refuse a traced loss that is too much work for its datums, as far as shapes tell.

    Raises:
        InvalidInputError: Names the datum or the step, what was counted and the limit.
    """
    program = check_graph(custom)
    names = [name for name, _ in program.inputs]
    first: dict[tuple[Shape, ...], int] = {}
    counts: Counter[tuple[Shape, ...]] = Counter()
    for index, datum in enumerate(data):
        shapes = tuple(_input_shape(datum, name) for name in names)
        first.setdefault(shapes, index)
        counts[shapes] += 1
    total, limit = 0, traced.request_limit(sum(len(datum.tokens) for datum in data))
    largest = sorted(counts, key=lambda shapes: -sum(map(math.prod, shapes)))
    most = max(1, min(MAX_COUNTED_SHAPES, MAX_COUNTED_STEPS // max(1, len(program.steps))))
    for shapes in largest[:most]:
        work, heaviest = _datum_operations(program, dict(zip(names, shapes, strict=True)))
        total += work * counts[shapes]
        if work > traced.DATUM_OPERATIONS or total > limit:
            raise InvalidInputError(
                f"the custom loss takes {work} operations for this datum (most: "
                f"{traced.DATUM_OPERATIONS}) and at least {total} for the request (most: {limit}); "
                f"most of them in node {heaviest!r}. {traced.ADVICE}",
                path=f"data[{first[shapes]}]",
            )


def _input_shape(datum: TrainDatum, name: str) -> Shape:
    value = datum.inputs.get("target_tokens" if name == "logprobs" else name)
    return () if value is None else tuple(map(int, form_of(value).shape))


def _datum_operations(program: Program, inputs: Mapping[str, Shape]) -> tuple[int, str]:
    """The operations known for one datum, and the node with most of them."""
    values: dict[str, Any] = {name: _Tensor(shape) for name, shape in inputs.items()}
    total, most, heaviest = 0, 0, ""
    for step in program.steps:
        name = step.target.rpartition(".")[2]
        args = [_filled(arg, values) for arg in step.args]
        kwargs = {key: _filled(arg, values) for key, arg in step.kwargs.items()}
        try:
            values[step.name] = value = _result(step, name, args, kwargs)
        except Exception:  # unknown here, or wrong: the engine finds out
            values[step.name] = value = None
        tensors = [*_tensors(args), *_tensors(kwargs)]
        size = sum(math.prod(tensor.shape) for tensor in _tensors(value))
        if not tensors and not size:
            continue
        indexes = any(_tensors(args[1:]))
        work = step_operations(name, [t.shape for t in tensors], size, indexes=indexes)
        total += work
        if work > most:
            most, heaviest = work, step.name
    return total, heaviest


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, NodeRef):
        return values[value.node]
    if isinstance(value, slice):
        return slice(*(_filled(part, values) for part in (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return type(value)(_filled(item, values) for item in value)
    return value


def _tensors(value: Any) -> Iterator[_Tensor]:
    if isinstance(value, _Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))


# ------------------------------------------------------------------------------------- the shapes


def _result(step: Step, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Shapes of what a step gives, or a plain number.

    Raises:
        Exception: It is not known.
    """
    if step.target in ops.FACTORIES:
        return _Tensor(_made(name, args, kwargs))
    if not any(_tensors((args, tuple(kwargs.values())))):
        return _number(step, name, args)
    if name in _RULES:
        return _RULES[name](*args, **kwargs)
    if name in ops.REDUCTIONS:
        return _reduced(name, args, kwargs)
    if name in ops.ELEMENTWISE:
        return _Tensor(_broadcast_exactly([t.shape for t in _tensors((args, kwargs))]))
    raise _UnknownShapeError


def _broadcast_exactly(shapes: Sequence[Shape]) -> Shape:
    return tuple(np.broadcast_shapes(*shapes))


_NUMBERS: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg")
}


def _number(step: Step, name: str, args: list[Any]) -> Any:
    if name == "getitem":
        return args[0][args[1]]
    if step.target.startswith("operator.") and all(isinstance(arg, int | float) for arg in args):
        value = _NUMBERS[name](*args)
        if abs(value) <= 2**63:
            return value
    raise _UnknownShapeError


def _sizes(args: Sequence[Any]) -> Shape:
    """Sizes given one by one or as one list."""
    given = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    if not all(isinstance(size, int) for size in given):
        raise _UnknownShapeError
    return tuple(given)


def _made(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Shape:
    if name == "scalar_tensor":
        return ()
    if name in ("zeros", "ones"):
        return _sizes([kwargs["size"]] if "size" in kwargs else args)
    if name == "full":
        return _sizes([kwargs.get("size", args[0] if args else None)])
    if name == "eye":
        return (args[0], args[1] if len(args) > 1 else args[0])
    if name == "arange" and not kwargs.keys() & {"start", "end", "step"}:
        start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
        return (max(0, math.ceil((stop - start) / step)),)
    if name == "linspace":
        return (kwargs.get("steps", args[2] if len(args) > 2 else None),)
    raise _UnknownShapeError


def _reduced(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    shape = args[0].shape
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], _Tensor):
        return _Tensor(_broadcast_exactly([shape, args[1].shape]))
    place = 2 if name in ("norm", "vector_norm", "quantile") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(dim, bool) or (len(args) > 1 and place == 1 and isinstance(args[1], bool)):
        raise _UnknownShapeError
    keeps = kwargs.get("keepdim", args[place + 1] if len(args) > place + 1 else False)
    if dim is None or dim == ():
        return _Tensor((1,) * len(shape) if keeps else ())
    dims = {d % len(shape) for d in (dim if isinstance(dim, tuple | list) else [dim])}
    sizes = [1 if at in dims else size for at, size in enumerate(shape) if keeps or at not in dims]
    value = _Tensor(tuple(sizes))
    return (value, value) if name in ("max", "min") else value


def _expand(x: _Tensor, *given: Any) -> _Tensor:
    sizes = _sizes(given)
    old = (1,) * (len(sizes) - len(x.shape)) + x.shape
    return _Tensor(tuple(b if a == -1 else a for a, b in zip(sizes, old, strict=True)))


def _repeat(x: _Tensor, *given: Any) -> _Tensor:
    sizes = _sizes(given)
    rank = max(len(sizes), len(x.shape))
    old = (1,) * (rank - len(x.shape)) + x.shape
    times = (1,) * (rank - len(sizes)) + sizes
    return _Tensor(tuple(a * b for a, b in zip(times, old, strict=True)))


def _view(x: _Tensor, *given: Any) -> _Tensor:
    sizes = _sizes(given)
    rest = math.prod(size for size in sizes if size != -1)
    return _Tensor(tuple(math.prod(x.shape) // rest if size == -1 else size for size in sizes))


def _unsqueeze(x: _Tensor, dim: int) -> _Tensor:
    at = dim % (len(x.shape) + 1)
    return _Tensor((*x.shape[:at], 1, *x.shape[at:]))


def _transpose(x: _Tensor, first: int = 0, second: int = 1) -> _Tensor:
    shape = list(x.shape)
    if len(shape) > 1:
        shape[first], shape[second] = shape[second], shape[first]
    return _Tensor(tuple(shape))


def _matmul(x: _Tensor, y: _Tensor) -> _Tensor:
    left, right = x.shape, y.shape
    batch = _broadcast_exactly([left[:-2], right[:-2]])
    return _Tensor((*batch, *left[-2:-1], *(right[-1:] if len(right) > 1 else ())))


def _cat(tensors: Sequence[_Tensor], dim: int = 0) -> _Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _Tensor(tuple(shape))


def _stack(tensors: Sequence[_Tensor], dim: int = 0) -> _Tensor:
    at = dim % (len(tensors[0].shape) + 1)
    shape = tensors[0].shape
    return _Tensor((*shape[:at], len(tensors), *shape[at:]))


def _getitem(x: Any, index: Any) -> Any:
    if isinstance(x, tuple | list):
        return x[index]
    parts = index if isinstance(index, tuple) else (index,)
    if not all(_is_plain(part) for part in parts):
        raise _UnknownShapeError
    # An array without memory of its own: numpy does to its shape what torch does.
    return _Tensor(np.broadcast_to(np.int8(0), x.shape)[index].shape)


def _is_plain(part: Any) -> bool:
    """Whether an index takes a view: numpy would make a copy for a list."""
    is_number = isinstance(part, int) and not isinstance(part, bool)
    return is_number or part is None or part is ... or isinstance(part, slice)


def _getattr(x: _Tensor, name: str) -> Any:
    if name == "shape":
        return x.shape
    if name == "ndim":
        return len(x.shape)
    if name == "T":
        return _Tensor(x.shape[::-1])
    if name == "mT":
        return _transpose(x, -2, -1)
    raise _UnknownShapeError


_RULES: Mapping[str, Callable[..., Any]] = {
    "getattr": _getattr,
    "getitem": _getitem,
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "dim": lambda x: len(x.shape),
    "numel": lambda x: math.prod(x.shape),
    "expand": _expand,
    "broadcast_to": _expand,
    "expand_as": lambda x, y: y,
    "view_as": lambda x, y: y,
    "reshape_as": lambda x, y: y,
    "repeat": _repeat,
    "tile": _repeat,
    "view": _view,
    "reshape": _view,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": _transpose,
    "permute": lambda x, *dims: _Tensor(tuple(x.shape[at] for at in _sizes(dims))),
    "matmul": _matmul,
    "mm": _matmul,
    "mv": _matmul,
    "dot": lambda x, y: _Tensor(()),
    "vdot": lambda x, y: _Tensor(()),
    "outer": lambda x, y: _Tensor((*x.shape, *y.shape)),
    "inner": lambda x, y: _Tensor((*x.shape[:-1], *y.shape[:-1])),
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "new_zeros": lambda x, *size, **_: _Tensor(_sizes(size)),
    "new_ones": lambda x, *size, **_: _Tensor(_sizes(size)),
    "new_full": lambda x, size, *_, **__: _Tensor(_sizes([size])),
    "full_like": lambda x, *_, **__: x,
    "ones_like": lambda x, *_, **__: x,
    "zeros_like": lambda x, *_, **__: x,
    "sort": lambda x, *_, **__: (x, x),
    "gather": lambda x, dim, index: index,
}

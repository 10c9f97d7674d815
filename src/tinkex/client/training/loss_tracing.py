"""Turn a Python loss into a graph of plain data that a server can run in one pass.

The function is traced with torch.fx on symbols: it runs once, here, and what it did to them is
written down. It may use torch, math and operator, and read only its parameters. What cannot be
written down (a branch on a tensor's value, a captured tensor, another module) is refused with the
name of the offender. The same handle also runs on this side, datum by datum, for servers that take
no graphs; both ways mean the same.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import math
import types as pytypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkex.contract.losses import CUSTOM_INPUT, CUSTOM_METRIC, MAX_CUSTOM_INPUTS
from tinkex.errors import InvalidInputError
from tinkex.types.data.datum import Datum
from tinkex.types.training.custom_loss import CustomLossInput

if TYPE_CHECKING:
    import torch

PerDatumLossFn = Callable[..., "tuple[torch.Tensor, dict[str, torch.Tensor]]"]
"""`fn(logprobs, *loss_fn_inputs) -> (scalar, metrics)` for one datum."""

_LEAVES_TORCH = frozenset({"backward", "item", "numpy", "tolist"})
_EFFECT_MODULES = frozenset(
    """asyncio ctypes http httpx importlib io logging multiprocessing nt os pathlib pickle posix
    posixpath random requests shutil signal socket subprocess sys tempfile threading time urllib
    """.split()
)
_EFFECT_BUILTINS = frozenset("__import__ compile eval exec input open print".split())


@dataclass(frozen=True)
class LossHandle:
    """A traced loss. Works only in the session that made it; `loss_id` is set once uploaded."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.inputs)

    @property
    def key(self) -> str:
        """Equal for equal graphs with equal inputs, whatever the function was called."""
        text = json.dumps(
            [[spec.model_dump() for spec in self.inputs], encode_graph(self)], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()


def trace_loss(fn: PerDatumLossFn, input_ranks: Mapping[str, int], session_id: str) -> LossHandle:
    """Trace `fn(logprobs, ...)` for tensors of the given ranks.

    Raises:
        InvalidInputError: The function cannot be written down as a graph.
    """
    import torch

    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _check_parameters(fn, name, input_ranks)
    _check_names(fn, name)
    try:
        graph = torch.fx.symbolic_trace(fn)
    except Exception as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise _refuse(
            name,
            f"cannot be traced: {reason}. Use torch.where instead of a branch on a tensor's value, "
            "and only functions of torch and math",
        ) from exc
    _check_graph(graph, name)
    handle = LossHandle(name, inputs, session_id, graph)
    encode_graph(handle)
    return handle


# -------------------------------------------------------------------------------- what is refused


def _check_parameters(
    fn: PerDatumLossFn, name: str, input_ranks: Mapping[str, int]
) -> tuple[CustomLossInput, ...]:
    if not callable(fn):
        raise _refuse(name, "is not a function")
    parameters = list(inspect.signature(fn).parameters.values())
    names = [parameter.name for parameter in parameters]
    if not names or names[0] != "logprobs":
        raise _refuse(name, f"must take logprobs first, got ({', '.join(names)})")
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise _refuse(name, f"may not have *args, **kwargs or keyword-only {parameter.name!r}")
        if parameter.default is not parameter.empty:
            raise _refuse(name, f"parameter {parameter.name!r} may not have a default")
        if not CUSTOM_INPUT.fullmatch(parameter.name):
            raise _refuse(name, f"parameter {parameter.name!r} must match {CUSTOM_INPUT.pattern}")
    if len(names) > MAX_CUSTOM_INPUTS:
        raise _refuse(
            name, f"takes {len(names)} parameters, at most {MAX_CUSTOM_INPUTS} are allowed"
        )
    if set(input_ranks) != set(names):
        raise _refuse(name, f"takes {names}, so input_ranks must too; got {sorted(input_ranks)}")
    for parameter_name, rank in input_ranks.items():
        allowed = (1, 2) if parameter_name == "logprobs" else (0, 1, 2)
        if rank not in allowed:
            raise _refuse(name, f"input_ranks[{parameter_name!r}] is {rank!r}, expected {allowed}")
    return tuple(CustomLossInput(name=n, rank=input_ranks[n]) for n in names)  # type: ignore[arg-type]


def _check_names(fn: Any, name: str) -> None:
    """Refuse side effects before anything runs: they would happen once, here, and then never."""
    pending, seen = [_plain_function(fn)], set[Any]()
    while pending:
        function = pending.pop()
        if function is None or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for found in _outer_names(function.__code__):
            value = scope.get(found, found)
            if (root := _side_effect(value)) is not None:
                raise _refuse(
                    name,
                    f"uses {found!r} ({root}), which would run once while tracing and never on the "
                    "server. Use torch, math and operator only, or pass the function itself to "
                    "forward_backward_custom to run it on your side",
                )
            pending.append(_plain_function(value))


def _plain_function(fn: Any) -> pytypes.FunctionType | None:
    """The Python function to look into; torch's own are trusted."""
    function = inspect.unwrap(fn) if callable(fn) else fn
    function = getattr(function, "__func__", function)
    if not isinstance(function, pytypes.FunctionType) or _root(function.__module__) == "torch":
        return None
    return function


def _side_effect(value: Any) -> str | None:
    """The module or builtin that makes `value` unfit for a graph. A str is a builtin's name."""
    if isinstance(value, str):
        root = _root(value)
        return value if value in _EFFECT_BUILTINS or root in _EFFECT_MODULES else None
    module = value.__name__ if isinstance(value, pytypes.ModuleType) else None
    if module is None and callable(value):
        module = getattr(value, "__module__", None)
    return module if _root(module) in _EFFECT_MODULES else None


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _outer_names(code: pytypes.CodeType) -> set[str]:
    """Names that a function takes from outside itself, imports included."""
    outside = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_NAME")
    names = {str(s.argval) for s in dis.get_instructions(code) if s.opname in outside}
    for constant in code.co_consts:
        if isinstance(constant, pytypes.CodeType):
            names |= _outer_names(constant)
    return names


def _check_graph(graph: torch.fx.GraphModule, name: str) -> None:
    import torch

    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise _refuse(
                name, f"captures a tensor ({node.target!r}); pass it in as a loss_fn_inputs key"
            )
        if node.op == "call_module":
            raise _refuse(name, f"calls the module {node.target!r}; write its arithmetic out")
        if node.op == "call_function" and _qualified(node.target) is None:
            raise _refuse(name, f"calls {node.target!r}, which is not of torch, math or operator")
        if node.op == "call_method":
            if node.target in _LEAVES_TORCH:
                raise _refuse(name, f"calls .{node.target}(); keep every value a tensor")
            if not hasattr(torch.Tensor, node.target):
                raise _refuse(name, f"calls .{node.target}(), which tensors do not have")
        if node.op == "output":
            _check_output(node.args[0], name)


def _check_output(value: Any, name: str) -> None:
    import torch

    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[1], dict):
        raise _refuse(name, "must return (loss, dict of metrics)")
    loss, metrics = value
    if not isinstance(loss, torch.fx.Node):
        raise _refuse(name, f"must return a tensor as its loss, got {loss!r}")
    for key, metric in metrics.items():
        if not isinstance(key, str) or not CUSTOM_METRIC.fullmatch(key):
            raise _refuse(name, f"metric {key!r} must be named custom/NAME:sum or custom/NAME:mean")
        if not isinstance(metric, torch.fx.Node):
            raise _refuse(name, f"metric {key!r} must be a tensor, got {metric!r}")


def _refuse(name: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{why}.", path=f"custom loss {name}")


# --------------------------------------------------------------------------------- graph to JSON


def encode_graph(handle: LossHandle) -> dict[str, Any]:
    """The graph as the plain JSON of contract 5.7."""
    nodes = []
    for node in handle.graph.graph.nodes:
        target = node.target
        if node.op == "call_function":
            target = _qualified(target)
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": str(target),
                # A placeholder's args hold its default, and none may have one.
                "args": [_encoded(arg, handle.name) for arg in node.args],
                "kwargs": {key: _encoded(arg, handle.name) for key, arg in node.kwargs.items()},
            }
        )
    return {"format": 1, "nodes": nodes}


def _qualified(function: Any) -> str | None:
    """`torch.exp`, `operator.mul`, `getattr`; None for a function of anything else."""
    name = getattr(function, "__name__", "")
    if function is getattr:
        return "getattr"
    module = getattr(function, "__module__", None) or ""
    if module == "_operator":
        return f"operator.{name}"
    if module == "math":
        return f"math.{name}"
    if not module:  # A method of torch's C extension, such as torch.exp.
        import torch

        return f"torch.{name}" if getattr(torch, name, None) is function else None
    if module == "torch" or module.startswith("torch."):
        return f"{module}.{name}"
    return None


def _encoded(value: Any, loss_name: str) -> Any:
    """An argument of a node as JSON; what JSON has no form for is named by its kind."""

    def inside(part: Any) -> Any:
        return _encoded(part, loss_name)

    import torch

    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": _float_name(value)}
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [inside(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, list):
        return [inside(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [inside(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): inside(item) for key, item in value.items()}}
    for kind in ("dtype", "device", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise _refuse(loss_name, f"passes {value!r}, which cannot be written as JSON")


def _float_name(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


# ------------------------------------------------------------------------------------ running here


def check_loss_inputs(
    handle: LossHandle, data: Sequence[Datum], besides: Collection[str] = ()
) -> None:
    """Refuse a batch in which a datum lacks an input of the loss, or has it at another rank.

    `besides` are inputs that the server fills in.
    """
    for index, datum in enumerate(data):
        for spec in handle.inputs[1:]:
            if spec.name in besides:
                continue
            tensor = datum.loss_fn_inputs.get(spec.name)
            where = f"data[{index}].loss_fn_inputs.{spec.name}"
            if tensor is None:
                raise InvalidInputError(
                    f"the custom loss {handle.name!r} reads it, and the datum has only "
                    f"{sorted(datum.loss_fn_inputs)}.",
                    path=where,
                )
            rank = len(tensor.shape) if tensor.shape is not None else tensor.array.ndim
            if rank != spec.rank:
                raise InvalidInputError(
                    f"the custom loss {handle.name!r} was traced for rank {spec.rank}, got rank "
                    f"{rank}.",
                    path=where,
                )


def run_handle(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a traced loss on this side: losses add up; `:mean` metrics average over datums.

    `functools.partial(run_handle, handle)` is a loss for `forward_backward_custom`.
    """
    import torch

    check_loss_inputs(handle, data)
    losses, totals = [], dict[str, Any]()
    for index, (datum, tensor) in enumerate(zip(data, logprobs, strict=True)):
        rest = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names[1:]]
        loss, metrics = handle.graph(tensor, *rest)
        if loss.dim() != 0:
            raise _refuse(
                handle.name,
                f"gave shape {tuple(loss.shape)} for data[{index}]; reduce it by .sum()",
            )
        losses.append(loss)
        for key, value in metrics.items():
            totals[key] = totals.get(key, 0.0) + value.detach().to(torch.float64)
    means = {k: v / len(losses) if k.endswith(":mean") else v for k, v in totals.items()}
    return torch.stack(losses).sum(), means

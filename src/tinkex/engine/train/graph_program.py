"""Read a traced custom loss (contract 5.7), which arrives as JSON from a stranger.

`check_graph` turns a graph into a list of steps, each an operation of the allow-list in `graph_ops`
on the results of earlier steps. Nothing is evaluated as code and nothing is unpickled: a name that
is not in the list is refused, and the refusal names the node. Needs no torch: a server reads a loss
when it is accepted; `graph` runs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.contract.losses import CUSTOM_INPUT, CUSTOM_METRIC, MAX_CUSTOM_INPUTS
from tinkex.engine.jobs import TracedLoss
from tinkex.engine.train import graph_ops as ops
from tinkex.errors import InvalidInputError, NotSupportedError

MAX_NODES = 1024
MAX_VALUES = 20_000
"""JSON values in all arguments of a graph together."""
MAX_DEPTH = 8
MAX_INTEGER = 2**63

_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class NodeRef:
    node: str


@dataclass(frozen=True, slots=True)
class NamedConstant:
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
            raise bad_node(name, "the name is used twice")
        if (node["op"] == "output") != last:
            raise bad_node(name, "exactly one output node must end the graph")
        if started and node["op"] == "placeholder":
            raise bad_node(name, "placeholders come before every other node")
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
            raise unsupported_node(name, f"calls the function {target[:100]!r}")
    elif op == "call_method":
        target = node["target"]
        if target not in ops.METHODS:
            raise unsupported_node(name, f"calls the tensor method {target[:100]!r}")
    else:
        raise unsupported_node(
            name, f"is a {op[:40]!r} node; a loss may not hold tensors or modules"
        )
    args = tuple(decoder.decode(name, value) for value in node.get("args", ()))
    kwargs = {key: decoder.decode(name, value) for key, value in node.get("kwargs", {}).items()}
    if bad := ops.FORBIDDEN_KEYWORDS & kwargs.keys():
        raise unsupported_node(name, f"passes {sorted(bad)[0]}=")
    if kwargs.get("inplace"):
        raise unsupported_node(name, "works in place")
    if target == "to":  # A device by name: the engine's own is the only one there is.
        args = tuple(NamedConstant("device", arg) if isinstance(arg, str) else arg for arg in args)
    if target == "getattr" and (
        len(args) != 2 or kwargs or not isinstance(args[1], str) or args[1] not in ops.ATTRIBUTES
    ):
        raise unsupported_node(name, f"reads the attribute {args[1:]!r}")
    return Step(name, op, target, args, kwargs)


def _parse_output(node: Mapping[str, Any], decoder: _Decoder) -> tuple[NodeRef, dict[str, NodeRef]]:
    values = [decoder.decode(node["name"], value) for value in node.get("args", ())]
    pair = values[0] if len(values) == 1 else None
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict)):
        raise bad_node(node["name"], "the output must be one tuple (loss, metrics)")
    loss, metrics = pair
    if not isinstance(loss, NodeRef):
        raise bad_node(node["name"], f"the loss must be a tensor, got {loss!r}")
    for key, value in metrics.items():
        if not CUSTOM_METRIC.fullmatch(key):
            raise bad_node(node["name"], f"metric {key[:80]!r} must match {CUSTOM_METRIC.pattern}")
        if not isinstance(value, NodeRef):
            raise bad_node(node["name"], f"metric {key!r} must be a tensor, got {value!r}")
    return loss, metrics


class _Decoder:
    """Argument values of one graph: counts them, and knows which nodes came before."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self._left = MAX_VALUES

    def decode(self, node: str, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise bad_node(
                node, f"the arguments hold over {MAX_VALUES} values or {MAX_DEPTH} levels"
            )
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
            raise bad_node(node, "an integer does not fit 64 bits")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self.decode(node, item, depth + 1) for item in value]
        if isinstance(value, Mapping) and len(value) == 1:
            return self._decode_tagged(node, *next(iter(value.items())), depth)
        raise bad_node(node, f"cannot read the argument {str(value)[:80]}")

    def _decode_tagged(self, node: str, tag: str, value: Any, depth: int) -> Any:
        if tag == "ref":
            if value not in self.known:
                raise bad_node(node, f"refers to {str(value)[:80]!r}, which is not an earlier node")
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
            return NamedConstant("device", value)
        named = {"dtype": ops.DTYPES, "layout": ops.LAYOUTS, "memory_format": ops.MEMORY_FORMATS}
        if tag in named:
            if value not in named[tag]:
                raise unsupported_node(node, f"uses the {tag} {str(value)[:40]!r}")
            return NamedConstant(tag, value)
        raise bad_node(node, f"cannot read the argument {{{tag[:40]!r}: ...}}")


def bad_node(node: str, what: str) -> InvalidInputError:
    return InvalidInputError(f"{what}.", path=f"custom loss node {node!r}")


def unsupported_node(node: str, what: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what}, which losses run by the server may not use (see docs/custom-losses.md). "
        "Pass the function itself to forward_backward_custom to run it on your side.",
        path=f"custom loss node {node!r}",
    )

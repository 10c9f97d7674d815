"""The work that a traced loss has done so far, in operations and seconds, and its limits.

Operations are counted from shapes before a step runs (`contract.traced`); seconds are looked at
between steps, where others may have a turn, which is not counted. The first refusal ends the whole
job: no later datum of it is begun.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinkex.contract import traced
from tinkex.engine.train import graph_ops as ops
from tinkex.errors import InvalidInputError, TinkerError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSeconds:
    """Most seconds of a traced loss."""

    datum_s: float = math.inf
    job_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class LossBudget:
    """The operations and seconds that the traced loss of one job may take, and has taken."""

    max_operations: float = math.inf
    max_datum_operations: float = traced.DATUM_OPERATIONS
    max_step_operations: float = traced.ONE_STEP_OPERATIONS
    datum_s: float = math.inf
    job_s: float = math.inf
    error: TinkerError | None = None
    """Why the job is refused, once it is."""
    give_turn: Callable[[], None] = lambda: None
    """Called between steps: others may use the device."""
    _operations: int = 0
    _datum_operations: int = 0
    _seconds: float = 0.0
    _began: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        """Count operations anew: the passes run again. Seconds stay spent."""
        self._operations, self.error = 0, None

    def begin(self) -> None:
        """Begin with a datum.

        Raises:
            InvalidInputError: Another datum of the job was refused.
        """
        self._datum_operations, self._began = 0, time.perf_counter()
        if self.error is not None:
            raise InvalidInputError(str(self.error))

    def end(self) -> None:
        """End with a datum, its backward included."""
        self._seconds += time.perf_counter() - self._began

    def spend(self, node: str, target: str, operations: int) -> None:
        """Count a step that is about to run."""
        is_product = target.rpartition(".")[2] in ops.PRODUCTS
        if operations > self.max_step_operations and not is_product:
            self._refuse(
                node,
                f"{target} takes {operations} operations in one step, over "
                f"{self.max_step_operations}",
            )
        self._operations += operations
        self._datum_operations += operations
        if self._datum_operations > self.max_datum_operations:
            self._refuse(
                node,
                f"with {target} the loss takes {self._datum_operations} operations for one datum, "
                f"over {self.max_datum_operations}",
            )
        if self._operations > self.max_operations:
            self._refuse(
                node,
                f"with {target} the loss takes {self._operations} operations for the request, "
                f"over {self.max_operations}",
            )

    def between(self, node: str, target: str) -> None:
        """Look at the clock after a step, forward or backward, and give others a turn."""
        self._check_time(node, target)
        left_at = time.perf_counter()
        self.give_turn()
        self._began += time.perf_counter() - left_at

    def _check_time(self, node: str, target: str) -> None:
        took_s = time.perf_counter() - self._began
        if took_s > self.datum_s:
            self._refuse(
                node,
                f"{target} ended {took_s:.1f} s after the datum began, over {self.datum_s:g} s",
            )
        if self._seconds + took_s > self.job_s:
            self._refuse(
                node,
                f"with {target} the loss has taken {self._seconds + took_s:.1f} s for the request, "
                f"over {self.job_s:g} s",
            )

    def _refuse(self, node: str, what: str) -> None:
        raise InvalidInputError(f"{what}. {traced.ADVICE}", path=f"custom loss node {node!r}")


# ------------------------------------------------------------------------------------- the count


def step_operations(name: str, operands: Sequence[Shape], size: int, *, indexes: bool) -> int:
    """Operations of a step: `name` without its module, shapes of its tensors, output elements.

    `indexes`: one of its tensors says where to read.
    """
    if name in ops.FREE:
        return 0
    if name in ops.PRODUCTS and len(operands) == 2:
        work = _product_operations(*operands, name=name)
    else:
        elements = max([size, *map(math.prod, operands)])
        is_simple = name in ops.SIMPLE or (name == "getitem" and not indexes)
        work = elements * (1 if is_simple else traced.SLOW if name in ops.SLOW else traced.COSTLY)
    return traced.STEP_OPERATIONS + work


def _product_operations(left: Shape, right: Shape, *, name: str) -> int:
    """2 m n k, for all matrices of a batch; every element of the output sums over `k`."""
    inner = left[-1] if left else 1
    if name == "outer":
        return math.prod(left) * math.prod(right)
    if name == "inner":
        return 2 * math.prod(left) * (math.prod(right[:-1]) if right else 1)
    batch = _broadcast(left[:-2], right[:-2])
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return 2 * math.prod(batch) * rows * inner * columns


def _broadcast(*shapes: Shape) -> Shape:
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        return max(shapes, key=math.prod)

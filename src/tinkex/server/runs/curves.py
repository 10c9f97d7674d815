"""Curves of training runs: what the server measures by itself, and what clients log.

A curve has at most `MAX_POINTS` points, fewer where a run has many curves. When it is full,
neighbours are joined by their mean and from then on one point stands for twice as many values, so a
run of any length costs the same and every part of it stays visible. Curves of runs in use are in
memory; what changed is written every few seconds, so a crash loses the last moments of a curve and
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinkex.errors import InvalidInputError
from tinkex.store import Model, Store, StoredCurve
from tinkex.types.service.extensions import MAX_METRIC

MAX_POINTS = 2048
MANY_CURVES = 200
MAX_CURVES = 1000
"""A run of more than `MANY_CURVES` keeps a quarter of the points of each."""
MAX_COURSE = 120
MAX_RUNS = 256
MAX_HELD = 500_000
"""Runs whose curves are kept in memory, and points of them all; more of one run stay while used."""
PACKED_AT_ONCE = 100
"""Curves that are packed to be written before others have a turn."""
PARTS = ("pass_time_s", "optim_time_s", "save_time_s")
"""What the time of a step goes to, `Operation.part_of_step`; the rest is `other_time_s`."""
MEASURED = frozenset(
    {"learning_rate", "grad_norm", "loss_per_token", "tokens", "tokens_per_s"}
    | {"step_time_s", "other_time_s", *PARTS}
)
"""Names of the server's own curves. A client's number of such a name has a curve of its own."""
_POINT = np.dtype([("step", "<f8"), ("value", "<f8"), ("at", "<f8")])


def most_points(num_curves: int) -> int:
    """How many points each curve of a run with so many of them may have."""
    return MAX_POINTS if num_curves <= MANY_CURVES else MAX_POINTS // 4


@dataclass(frozen=True, slots=True)
class Course:
    """A curve in short, for a list of runs."""

    last_step: float
    last_value: float
    total: float
    """Of all values that went into it."""
    values: Sequence[float]
    """At most `MAX_COURSE` of them, evenly chosen."""


@dataclass(slots=True)
class Curve:
    """Points in the order they were made: step, value, moment."""

    stride: int = 1
    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    num_made: int = 0
    """Points ever made; a page asks for those after the last it has."""
    _sum: float = 0.0
    _count: int = 0

    def add(self, step: float, value: float, at: float, *, limit: int = MAX_POINTS) -> None:
        self._sum += value
        self._count += 1
        if self._count < self.stride:
            return
        self.steps.append(step)
        self.values.append(self._sum / self._count)
        self.moments.append(at)
        self.num_made += 1
        self._sum, self._count = 0.0, 0
        while len(self.steps) >= limit:
            self._thin()

    def _thin(self) -> None:
        # One that has no neighbour stays: the limit may have fallen at an odd length.
        last = self.values[len(self.values) & ~1 :]
        pairs = zip(self.values[::2], self.values[1::2], strict=False)
        self.values = [(one + other) / 2 for one, other in pairs] + last
        self.steps = self.steps[1::2] + self.steps[len(self.steps) & ~1 :]
        self.moments = self.moments[1::2] + self.moments[len(self.moments) & ~1 :]
        self.stride *= 2

    def course(self) -> Course:
        # By step: calls that a client does not wait for overtake each other.
        order = sorted(range(len(self.steps)), key=self.steps.__getitem__)
        every, last = math.ceil(len(order) / MAX_COURSE), order[-1]
        total = sum(self.values) * self.stride
        values = [self.values[index] for index in order[::every]]
        return Course(self.steps[last], self.values[last], total, values)

    def packed(self) -> bytes:
        array = np.empty(len(self.steps), _POINT)
        array["step"], array["value"], array["at"] = self.steps, self.values, self.moments
        return array.tobytes()

    @classmethod
    def unpacked(cls, stored: StoredCurve) -> Curve:
        array: NDArray[np.void] = np.frombuffer(stored.points, _POINT)
        return cls(
            stride=stored.stride,
            steps=array["step"].tolist(),
            values=array["value"].tolist(),
            moments=array["at"].tolist(),
            num_made=len(array),
        )


@dataclass(slots=True)
class _Run:
    curves: dict[str, Curve]
    dirty: set[str] = field(default_factory=set)
    num_steps: int = 0
    first_step: int = 0
    """Of `num_steps`, those of the segments before it."""
    loss: float = 0.0
    tokens: float = 0.0
    weight: float = 0.0
    """What `loss` is divided by; tokens, where they have no weights of their own."""
    gap: list[tuple[str, float]] = field(default_factory=list)
    stepped_at: float = 0.0
    busy_until: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds of the worker since the last step, by part."""

    @property
    def num_points(self) -> int:
        return sum(len(curve.steps) for curve in self.curves.values())

    @property
    def is_busy(self) -> bool:
        """Whether letting go of it would lose what the next step or write needs."""
        return bool(self.dirty or self.spent or self.tokens or self.weight or self.gap)


def _course(stored: StoredCurve) -> Course:
    """The same as `Curve.unpacked(stored).course()`, for a tenth of the time."""
    array: NDArray[np.void] = np.frombuffer(stored.points, _POINT)
    array = array[np.argsort(array["step"], kind="stable")]
    values = array["value"]
    every = math.ceil(len(values) / MAX_COURSE)
    total = float(values.sum(dtype=np.float64)) * stored.stride
    last = array[-1]
    return Course(float(last["step"]), float(last["value"]), total, values[::every].tolist())


class LiveCurves:
    """All curves of one server. On the event loop only; the store is asked off it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._opening: dict[str, asyncio.Task[_Run]] = {}
        self._writing = asyncio.Lock()  # a curve that is dropped must not be written again
        self._num_held = 0  # points, as of the last write and what was read since

    # ------------------------------------------------------------------------ what happens

    def worked(
        self, model: Model, key_id: int | None, part: str, started_at: float, ended_at: float
    ) -> float:
        """Count the time that the worker had a request, and give it in seconds.

        Requests sent ahead overlap, and time counts once.
        """
        run = self._runs.get(model.model_id)
        before = max(run.busy_until, run.stepped_at) if run is not None else 0.0
        seconds = max(0.0, ended_at - max(started_at, before))
        if run is not None:
            run.spent[part] = run.spent.get(part, 0.0) + seconds
            run.busy_until = max(run.busy_until, ended_at)
        self._store.usage.add_kinds(
            {"device_seconds": seconds},
            user_id=model.user_id,
            session_id=model.session_id,
            model_id=model.model_id,
            base_model=model.base_model,
            key_id=key_id,
        )
        return seconds

    async def passed(
        self, run_id: str, metrics: Mapping[str, float], weight: float | None = None
    ) -> None:
        """A forward_backward ran; its numbers belong to the step that follows.

        `weight` is the sum of the weights of its tokens; None: each of them counts as one.
        """
        run = await self._open(run_id)
        tokens = metrics.get("num_active_tokens:sum", metrics.get("num_tokens:sum", 0.0))
        run.loss += metrics.get("loss:sum", 0.0)
        run.tokens += tokens
        run.weight += tokens if weight is None else weight
        run.gap = [
            (name.partition(":")[0], value)
            for name, value in metrics.items()
            if name.startswith(("sampler_gap", "e_", "kl", "ratio"))
        ]

    async def stepped(
        self, run_id: str, metrics: Mapping[str, float], learning_rate: float
    ) -> None:
        """An optim_step ran."""
        run = await self._open(run_id)
        now = time.time()
        measured = {"learning_rate": learning_rate, **dict(run.gap)}
        if "grad_norm:mean" in metrics:
            measured["grad_norm"] = metrics["grad_norm:mean"]
        if run.weight:
            measured["loss_per_token"] = run.loss / run.weight
        if run.tokens:
            measured["tokens"] = run.tokens
            if run.stepped_at and now > run.stepped_at:
                measured["tokens_per_s"] = run.tokens / (now - run.stepped_at)
        if run.stepped_at:
            measured["step_time_s"] = now - run.stepped_at
            measured |= {part: run.spent.get(part, 0.0) for part in PARTS}
            measured["other_time_s"] = max(0.0, now - run.stepped_at - sum(run.spent.values()))
        run.spent = {}
        run.stepped_at = now
        run.loss = run.tokens = run.weight = 0.0
        run.gap = []
        run.num_steps += 1
        self._add(run, measured, run.num_steps, now)

    async def log(self, run_id: str, metrics: Mapping[str, float], step: int | None) -> None:
        """Add numbers that a client measured, under names of its own.

        Raises:
            InvalidInputError: Too many curves, or a name that cannot be one.
        """
        run = await self._open(run_id)
        metrics = {f"{k} (logged)" if k in MEASURED else k: v for k, v in metrics.items()}
        new = [name for name in metrics if name not in run.curves]
        if len(run.curves) + len(new) > MAX_CURVES:
            raise InvalidInputError(
                f"a run has at most {MAX_CURVES} curves, this one {len(run.curves)}; log fewer "
                "names",
                path="metrics",
            )
        self._add(run, metrics, run.num_steps if step is None else step, time.time())

    def _add(self, run: _Run, metrics: Mapping[str, float], step: float, at: float) -> None:
        for name, value in metrics.items():
            if abs(value) <= MAX_METRIC:  # and neither infinite nor no number
                curve = run.curves.setdefault(name, Curve())
                curve.add(step, float(value), at, limit=most_points(len(run.curves)))
                run.dirty.add(name)

    # ------------------------------------------------------------------------ who looks

    async def of_run(self, run_id: str) -> dict[str, Curve]:
        return (await self._open(run_id)).curves

    async def of_runs(
        self, run_ids: Sequence[str], names: Sequence[str]
    ) -> dict[tuple[str, str], Course]:
        """Some curves of many runs in short: from memory, or from the store."""
        courses: dict[tuple[str, str], Course] = {}
        elsewhere = [run_id for run_id in run_ids if run_id not in self._runs]
        if elsewhere:
            courses = await self._store.call(self._stored_courses, elsewhere, names)
        for run_id in run_ids:
            run = self._runs.get(run_id)
            for name in names:
                if run is not None and name in run.curves and run.curves[name].values:
                    courses[run_id, name] = run.curves[name].course()
        return courses

    async def some_of_runs(
        self, run_ids: Sequence[str], names: Sequence[str]
    ) -> dict[str, dict[str, Curve]]:
        """Some curves of many runs by run and name: from memory, or from the store."""
        elsewhere = [run_id for run_id in run_ids if run_id not in self._runs]
        curves: dict[str, dict[str, Curve]] = {}
        for stored in await self._store.call(self._store.curves.of_runs, elsewhere, names):
            curves.setdefault(stored.model_id, {})[stored.name] = Curve.unpacked(stored)
        for run_id in run_ids:
            if (run := self._runs.get(run_id)) is not None:
                curves[run_id] = {n: run.curves[n] for n in names if n in run.curves}
        return curves

    def _stored_courses(
        self, run_ids: Sequence[str], names: Sequence[str]
    ) -> dict[tuple[str, str], Course]:
        stored = self._store.curves.of_runs(run_ids, names)
        return {(curve.model_id, curve.name): _course(curve) for curve in stored if curve.points}

    def num_steps(self, run_id: str) -> int:
        """Steps of a run that is in use; 0 for one that is not."""
        run = self._runs.get(run_id)
        return run.num_steps if run is not None else 0

    async def count_steps(self, run_id: str) -> int:
        """Optimizer steps of a run, those of the segments before it included."""
        return (await self._open(run_id)).num_steps

    async def begin_at(self, run_id: str, num_steps: int) -> None:
        """Number the steps of a run on from those of the segments before it.

        Steps that it has made already are moved up.
        """
        run = await self._open(run_id)
        moved = num_steps - run.first_step
        run.first_step, run.num_steps = num_steps, run.num_steps + moved
        for name in MEASURED & run.curves.keys() if moved else ():
            run.curves[name].steps = [step + moved for step in run.curves[name].steps]
            run.dirty.add(name)

    # ------------------------------------------------------------------------ keeping

    async def drop(self, run_id: str) -> None:
        async with self.dropping([run_id]):
            await self._store.call(self._store.curves.drop, run_id)

    @contextlib.asynccontextmanager
    async def dropping(self, run_ids: Sequence[str]) -> AsyncIterator[None]:
        """Forget the curves of runs; the block removes them from the store."""
        async with self._writing:
            yield
            for run_id in run_ids:
                self._runs.pop(run_id, None)

    async def flush(self) -> None:
        """Write what changed, and let go of runs nobody used lately."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        changed: list[StoredCurve] = []
        for run_id, run in list(self._runs.items()):
            names, run.dirty = run.dirty, set()  # what changes from here on is written next time
            for name in names:
                curve = run.curves[name]
                changed.append(
                    StoredCurve(
                        model_id=run_id, name=name, stride=curve.stride, points=curve.packed()
                    )
                )
                if len(changed) % PACKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        if changed:
            await self._store.call(self._store.curves.save, changed)
        self._trim()

    def _trim(self) -> None:
        """Let go of runs that nobody used lately, those in the middle of a step last."""
        self._num_held = sum(run.num_points for run in self._runs.values())
        self._let_go_while_above(MAX_HELD, [n for n, run in self._runs.items() if not run.is_busy])
        self._let_go_while_above(
            4 * MAX_HELD, [n for n, run in self._runs.items() if not run.dirty]
        )

    def _let_go_while_above(self, max_held: int, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            is_enough = self._num_held <= max_held and len(self._runs) <= MAX_RUNS
            if is_enough or len(self._runs) == 1:
                return
            self._num_held -= self._runs.pop(run_id).num_points

    def let_go(self, run_id: str) -> None:
        """A run is parked: its curves are read again when somebody looks."""
        run = self._runs.get(run_id)
        if run is not None and not run.dirty:
            del self._runs[run_id]

    async def _open(self, run_id: str) -> _Run:
        run = self._runs.get(run_id)
        if run is not None:
            self._runs.move_to_end(run_id)
            return run
        # One reading for all who ask at once; shielded, for one of them may hang up.
        task = self._opening.get(run_id)
        if task is None:
            task = self._opening[run_id] = asyncio.create_task(self._load(run_id))
        try:
            return await asyncio.shield(task)
        finally:
            self._opening.pop(run_id, None)

    async def _load(self, run_id: str) -> _Run:
        if self._num_held > 2 * MAX_HELD:  # many were read since the last write
            await self.flush()

        def read() -> dict[str, Curve]:
            stored = self._store.curves.of_run(run_id)
            return {curve.name: Curve.unpacked(curve) for curve in stored}

        # Off the loop, the unpacking too: a run may have a thousand curves.
        curves = await self._store.call(read)
        model = await self._store.call(self._store.models.get, run_id)
        run = _Run(curves)
        self._num_held += run.num_points
        run.num_steps = run.first_step = (model.first_step if model else None) or 0
        if (rate := run.curves.get("learning_rate")) is not None and rate.steps:
            run.num_steps = int(rate.steps[-1])
        return self._runs.setdefault(run_id, run)

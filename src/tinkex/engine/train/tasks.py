"""A training job on its way through the passes: checked, cut into runs, collected, answered.

A `TrainTask` is a job whose every input has been checked against its loss and the model. Passes cut
its datums into runs, the scorer fills them, and `collect` brings logprobs, losses and metrics back.
It holds numbers and knows neither the decoder nor how datums were packed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.contract.losses import Loss, read_settings
from tinkex.contract.traced import request_limit
from tinkex.engine.jobs import Array, DeviceTurn, TracedLoss, TrainJob, TrainResult
from tinkex.engine.metrics import Gap, Tally, fsum
from tinkex.engine.optim.shards import deal
from tinkex.engine.train.data import Limits, loss_of
from tinkex.engine.train.graph import build_loss
from tinkex.engine.train.graph_cost import LossBudget, LossSeconds
from tinkex.engine.train.graph_shapes import check_work
from tinkex.engine.train.losses import GAP_INPUTS, Prepared, gap_metrics, loss_values, prepare
from tinkex.engine.train.packing import Item, Pass
from tinkex.engine.train.router_load import RouterLoad
from tinkex.engine.train.scoring import Evaluate, RowRun
from tinkex.errors import InvalidInputError, TinkerError

MAX_TURNS = 64
"""Passes of a job that are told one by one; of more, neighbours are told as one."""
DIVERGED = (
    "the {what} not finite: the adapter has diverged or an input is extreme. Lower the learning "
    "rate, or load an earlier checkpoint. Nothing was changed."
)


@dataclass(slots=True, kw_only=True)
class TrainTask:
    """A checked job and what its passes have found so far."""

    job: TrainJob
    data: list[Prepared]
    evaluate: Evaluate
    token_local: bool
    budget: LossBudget | None = None
    """Of a traced loss."""
    logprobs: list[Array | None] = field(init=False)
    losses: list[Tensor] = field(init=False)
    metrics: list[Mapping[str, float]] = field(init=False)
    gaps: list[Gap] = field(init=False)
    router_load: RouterLoad = field(init=False)
    seconds: float = field(init=False)
    turns: list[DeviceTurn] = field(init=False)
    error: TinkerError | None = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what the passes found."""
        self.logprobs = [None] * len(self.data)
        self.losses, self.metrics, self.gaps = [], [], []
        self.router_load = RouterLoad()
        self.seconds = 0.0
        self.turns = []
        self.error = None
        if self.budget is not None:
            self.budget.restart()

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens_T) for datum in self.data)

    def note_pass(self, began_at: float, ended_at: float, num_tokens: int) -> None:
        """Keep when a pass ran in which the job had so many tokens."""
        if len(self.turns) == MAX_TURNS:
            pairs = zip(self.turns[::2], self.turns[1::2], strict=True)
            self.turns = [
                DeviceTurn("passes", a.began_at, b.ended_at, a.size + b.size) for a, b in pairs
            ]
        self.turns.append(DeviceTurn("pass", began_at, ended_at, num_tokens))

    def needs_backward(self, datum: Prepared) -> bool:
        return self.job.backward and bool(datum.active_T.any())

    @property
    def shards(self) -> Sequence[int]:
        """The virtual shard of each datum."""
        return self.job.shards or deal([len(datum.tokens_T) for datum in self.data])

    def loss_parts(self) -> tuple[float, ...]:
        """The losses of the runs; one copy from the device for all of them."""
        return tuple(torch.stack(self.losses).double().tolist()) if self.losses else ()

    def result(self) -> TrainResult:
        tally = Tally(
            losses=self.loss_parts(),
            sums={
                "num_tokens:sum": float(self.num_tokens),
                "num_active_tokens:sum": float(sum(int(d.active_T.sum()) for d in self.data)),
                "train_time_s:sum": self.seconds,
            },
            gaps=tuple(self.gaps),
            custom=tuple(self.metrics),
            routers=self.router_load.counts(),
        )
        outputs = tuple({"logprobs": array} for array in self.logprobs if array is not None)
        return TrainResult(
            outputs=outputs,
            metrics=tally.metrics(),
            num_tokens=self.num_tokens,
            tally=tally,
            turns=tuple(self.turns),
        )


def check_job(job: TrainJob, limits: Limits, seconds: LossSeconds | None = None) -> TrainTask:
    """Everything that can be wrong with a job, found before anything runs.

    `seconds` bounds a traced loss; None: nothing but its operations does.

    Raises:
        InvalidInputError: Names the field, the value and what is allowed.
    """
    loss = loss_of(job)
    evaluate: Evaluate
    budget = None
    if isinstance(loss, TracedLoss):
        budget = _budget(job, loss, seconds)
        evaluate = partial(_evaluate_custom, build_loss(loss, budget))
    else:
        evaluate = partial(_evaluate_loss, loss, read_settings(loss, job.loss_fn_config))
    return TrainTask(
        job=job,
        data=[
            prepare(datum, loss, path=f"data[{index}]", limits=limits)
            for index, datum in enumerate(job.data)
        ],
        evaluate=evaluate,
        token_local=isinstance(loss, Loss) and loss.token_local,
        budget=budget,
    )


def _budget(job: TrainJob, loss: TracedLoss, seconds: LossSeconds | None) -> LossBudget:
    if job.is_replay:  # it ended well before, and must not end otherwise on a busier machine
        none = math.inf
        return LossBudget(max_datum_operations=none, max_step_operations=none)
    limit = seconds or LossSeconds()
    if job.shards:  # a part of a job, which was judged as a whole
        return LossBudget(datum_s=limit.datum_s, job_s=limit.job_s)
    check_work(loss, job.data)
    num_tokens = sum(len(datum.tokens) for datum in job.data)
    return LossBudget(
        max_operations=request_limit(num_tokens), datum_s=limit.datum_s, job_s=limit.job_s
    )


def _evaluate_loss(
    loss: Loss, settings: Mapping[str, float], logprobs: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    return loss_values(loss, logprobs, inputs, settings).double().sum(), {}


def _evaluate_custom(
    function: Callable[[Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]],
    logprobs: Tensor,
    inputs: Mapping[str, Tensor],
) -> tuple[Tensor, Mapping[str, Tensor]]:
    return function({"logprobs": logprobs, **inputs})


def runs_of(
    one: Pass, tasks: Sequence[TrainTask], device: torch.device
) -> Iterator[tuple[RowRun, list[Item]]]:
    """Cut a pass into runs: datums of one job side by side, or single datums of other losses."""
    placed = list(zip(one.items, pairwise(one.bounds), strict=True))

    def key(entry: tuple[Item, tuple[int, int]]) -> tuple[Any, ...]:
        item, _ = entry
        task = tasks[item.job]
        datum = task.data[item.datum]
        alone = -1 if task.token_local else item.datum
        kind = datum.targets.shape[1:], sorted(datum.inputs)
        return item.job, (item.shard, item.piece), alone, kind

    for _, group in groupby(placed, key):
        entries = list(group)
        task = tasks[entries[0][0].job]
        data = [task.data[item.datum] for item, _ in entries]
        run = RowRun(
            start=entries[0][1][0],
            stop=entries[-1][1][1],
            targets=torch.cat([datum.targets for datum in data]).to(device),
            inputs={
                name: torch.cat([datum.inputs[name] for datum in data]).to(device)
                if len(data) > 1
                else data[0].inputs[name].to(device)
                for name in data[0].inputs
            },
            active=torch.cat([datum.active_T for datum in data]).numpy(),
            evaluate=task.evaluate,
            token_local=task.token_local,
            budget=task.budget,
            piece=(entries[0][0].shard, entries[0][0].piece),
        )
        yield run, [item for item, _ in entries]


def collect(run: RowRun, items: Sequence[Item], tasks: Sequence[TrainTask]) -> None:
    """Hand a run's logprobs and loss back to the job it came from."""
    task = tasks[items[0].job]
    logprobs = run.logprobs.cpu()  # one copy for all datums of the run
    pieces = logprobs.split([item.length for item in items])
    for item, piece in zip(items, pieces, strict=True):
        task.logprobs[item.datum] = piece.numpy()
    task.losses += run.losses
    if run.error is not None and task.error is None:
        task.error = InvalidInputError(str(run.error), path=f"data[{items[0].datum}]")
    if run.metrics:
        task.metrics.append({name: float(value) for name, value in run.metrics.items()})
    if task.budget is None:
        inputs = {name: value.cpu() for name, value in run.inputs.items() if name in GAP_INPUTS}
        if (gap := gap_metrics(logprobs, inputs)) is not None:
            task.gaps.append(gap)


def divergence(task: TrainTask) -> TinkerError | None:
    """An error that names the first datum whose numbers are not finite."""
    for index, logprobs in enumerate(task.logprobs):
        if logprobs is None or not np.isfinite(logprobs).all():
            what = DIVERGED.format(what="logprobs are")
            return InvalidInputError(what, path=f"data[{index}]")
    if math.isfinite(fsum(task.loss_parts())):
        return None
    # A traced loss refuses a value that is not finite itself; it is not evaluated again.
    for index, (datum, logprobs) in enumerate(zip(task.data, task.logprobs, strict=True)):
        if task.budget is not None:
            break
        loss, _ = task.evaluate(torch.as_tensor(logprobs), datum.inputs)
        if not math.isfinite(float(loss)):
            return InvalidInputError(DIVERGED.format(what="loss is"), path=f"data[{index}]")
    return InvalidInputError(DIVERGED.format(what="sum of the losses is"), path="data")

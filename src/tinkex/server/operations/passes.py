"""forward and forward_backward: training data through the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tinkex.contract.losses import LOSSES, WEIGHTS
from tinkex.contract.teachers import PATH
from tinkex.engine.jobs import (
    CsrArray,
    Job,
    ModelInfo,
    Result,
    TracedLoss,
    TrainDatum,
    TrainJob,
    TrainResult,
)
from tinkex.errors import InvalidInputError
from tinkex.server.jobs import encode, teaching, validation
from tinkex.server.jobs.decode import TrainRequest, train_request
from tinkex.server.process.off_loop import off_loop
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Outcome
from tinkex.server.work.operation import Conclusion, Operation, OperationRun
from tinkex.server.work.teachers import Teachers
from tinkex.store import Model, UsageCount, UsageKind, User
from tinkex.wire.generation import JSON, PROTOBUF
from tinkex.wire.requests import Opened

METRICS_BYTES, OUTPUT_BYTES = 512, 64
"""About what names, shapes and metrics of a result take, in all and for each datum."""
PROTO_BODY, JSON_BODY, TAUGHT_BODY = b"P", b"J", b"T"
"""The first byte of a body in the journal: how to read the rest. A taught one has the length of a
teacher's logprobs in eight bytes, then these, then the body as it came."""


def _weight_of(checked: TrainRequest) -> float | None:
    """The sum that a loss is divided by to be the loss of a token, whatever scale its weights have.

    Users who weigh each of n tokens by 1/n have divided the loss by n already; to divide by the
    number of tokens once more would show a loss n times too small.
    """
    loss = LOSSES.get(checked.loss_fn)
    if loss is None or not loss.weighs_itself:
        return None
    total = 0.0
    for datum in checked.data:
        weights = datum.inputs[WEIGHTS.name]
        stored = weights.values if isinstance(weights, CsrArray) else weights
        total += float(np.abs(stored).sum())
    return total


class Forward(Operation[TrainRequest]):
    """Loss and outputs only. Clients up to 0.24 ask here; newer ones flag a forward_backward."""

    name = "forward"
    usage_kind: UsageKind = "sampling_prefill"
    part_of_step = "pass_time_s"

    def __init__(self, deps: Dependencies) -> None:
        super().__init__(deps)
        self._teachers = Teachers(deps)

    def identity(self, opened: Opened) -> bytes:
        """The body, the mark of its encoding in front."""
        return (PROTO_BODY if opened.is_protobuf else JSON_BODY) + opened.content

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> TrainRequest:
        info = await self.deps.catalog.info(model.base_model)
        checked = await off_loop(len(opened.content), self._judge, opened, info)
        if checked.teaching is not None:
            session = await self._teachers.open(checked.teaching, user)
            theirs = await self.deps.catalog.info(session.base_model)
            size = len(opened.content)
            await off_loop(size, teaching.check_fit, checked.taught_from, info, theirs)
            checked.teaching.base_model = session.base_model
        if (loss := await self._custom_loss(checked, user.user_id)) is not None:
            await asyncio.to_thread(_check_traced, loss, checked)
        return checked

    def _judge(self, opened: Opened, info: ModelInfo | None) -> TrainRequest:
        checked = self.read(opened)
        validation.check_train(checked, info)
        return checked

    def read(self, opened: Opened) -> TrainRequest:
        return train_request(opened.read())

    def tokens(self, checked: TrainRequest) -> Mapping[UsageKind, int]:
        return {self.usage_kind: sum(len(datum.tokens) for datum in checked.data)}

    def spends(self, checked: TrainRequest, model: Model) -> dict[str, float]:
        spends = super().spends(checked, model)
        if checked.teaching is not None:
            prefill = f"{checked.teaching.base_model} sampling_prefill"
            count = sum(len(datum.tokens) + 1 for datum in checked.taught_from)
            spends[prefill] = spends.get(prefill, 0) + count
        return spends

    def result_bytes(self, checked: TrainRequest) -> int:
        outputs = sum(_logprob_bytes(datum) for datum in checked.data)
        if checked.teaching is None:
            return METRICS_BYTES + outputs
        # A teacher's logprobs are in the result, and before that in the journal (`_keep_scores`).
        return METRICS_BYTES + (3 if self.changes_state else 2) * outputs

    def pack(self, opened: Opened, checked: TrainRequest) -> bytes:
        # The bytes as they came, not what was made of them: a replay reads them by the same code.
        return self.identity(opened)

    def unpack(self, body: bytes, model: Model) -> TrainRequest:
        if body[:1] == TAUGHT_BODY:
            end = 9 + int.from_bytes(body[1:9], "big")
            checked = self.unpack(body[end:], model)
            assert checked.teaching is not None
            checked.teaching.scores = teaching.unpack_scores(checked.data, body[9:end])
            return checked
        kind = PROTOBUF if body[:1] == PROTO_BODY else JSON
        return self.read(self.open(body[1:], kind))

    async def job(self, checked: TrainRequest, run: OperationRun) -> TrainJob:
        return TrainJob(
            job_id=run.job_id,
            adapter_id=run.model.model_id,
            data=checked.data,
            loss_fn=checked.loss_fn,
            loss_fn_config=checked.loss_fn_config,
            backward=self.changes_state,
            # Looked up again: the journal keeps the name of a traced loss, not its graph.
            custom_loss=await self._custom_loss(checked, run.model.user_id),
        )

    async def complete(self, checked: TrainRequest, run: OperationRun, job: Job) -> Job:
        """Fill in the logprobs of a teacher, which a replay finds in the journal.

        So the state can be made again when the teacher's checkpoint was deleted or replaced, and
        the right to read it is looked at when the work runs, and only then.
        """
        if checked.teaching is None:
            return job
        assert isinstance(job, TrainJob)
        if not checked.teaching.scores:
            store = self.deps.store
            user = await store.call(store.accounts.get_user, run.model.user_id)
            if user is None:
                raise InvalidInputError(f"there is no user {run.model.user_id!r} any more")
            await self._teachers.score(checked, user, run.request_id)
            if self.changes_state:
                await self._keep_scores(checked, run.request_id)
        size = sum(datum.tokens.nbytes for datum in checked.data)
        work = teaching.taught, checked.data, checked.loss_fn, checked.teaching
        return replace(job, data=await off_loop(size, *work))

    async def _keep_scores(self, checked: TrainRequest, request_id: str) -> None:
        assert checked.teaching is not None
        journal, store = self.deps.store.journal, self.deps.store
        before = await store.call(journal.body, request_id)
        if before is None:
            raise InvalidInputError(f"the body of {request_id} left the journal")
        scores = teaching.pack_scores(checked.teaching.scores)
        body = TAUGHT_BODY + len(scores).to_bytes(8, "big") + scores + before
        await asyncio.wrap_future(journal.replace_body(request_id, body))

    async def _custom_loss(self, checked: TrainRequest, user_id: str) -> TracedLoss | None:
        if checked.loss_fn != "custom":
            return None
        loss_id = str(checked.loss_fn_config["loss_id"])
        store = self.deps.store
        loss = await store.call(store.sampling.get_loss, loss_id)
        if loss is None or loss.user_id != user_id:
            raise InvalidInputError(
                f"no custom loss {loss_id!r}; create it with create_custom_loss first",
                path="loss_fn_config.loss_id",
            )
        inputs = tuple((str(item["name"]), int(item["rank"])) for item in loss.inputs)
        return TracedLoss(inputs=inputs, graph=loss.graph)

    async def conclude(
        self, checked: TrainRequest, run: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        assert isinstance(result, TrainResult)
        model = run.model
        usage = self._count(run, model.base_model, {self.usage_kind: result.num_tokens})
        if (teacher := checked.teaching) is not None:
            usage += self._count(run, teacher.base_model, teacher.usage())
            result = teaching.reported(result, teacher)
        self.deps.timelines.passed(model, run.job_id, result.turns)
        if self.changes_state:
            size = sum(datum.tokens.nbytes for datum in checked.data)
            weight = await off_loop(size, _weight_of, checked)
            await self.deps.curves.passed(model.model_id, result.metrics, weight)
            await self.deps.rollouts.trained(model.user_id, model.model_id, checked.data)
        return Conclusion(outcome=self.outcome(checked, result), usage=tuple(usage))

    def outcome(self, checked: TrainRequest, result: TrainResult) -> Outcome:
        return Outcome(kind="train", payload=encode.train_payload(result))

    def _count(
        self, run: OperationRun, base_model: str, counts: Mapping[UsageKind, float]
    ) -> list[UsageCount]:
        """Count use of a model for budgets; gives it as it goes to the store."""
        model = run.model
        owner = model.user_id, run.key_id, model.model_id, base_model
        self.deps.open_work.budgets.count(*owner, counts)
        return [
            UsageCount(
                kind=kind,
                count=count,
                user_id=model.user_id,
                session_id=model.session_id,
                model_id=model.model_id,
                base_model=base_model,
                project_id=run.project_id,
                key_id=run.key_id,
            )
            for kind, count in counts.items()
        ]


def _check_traced(loss: TracedLoss, checked: TrainRequest) -> None:
    data = checked.data
    if checked.teaching is not None:
        if teaching.T not in dict(loss.inputs):
            raise InvalidInputError(
                f"the custom loss has no input {teaching.T} for a teacher to fill in; its inputs "
                f"are {', '.join(name for name, _ in loss.inputs)}",
                path=PATH,
            )
        data = teaching.placeholders(data)
    validation.check_traced_work(loss, data)


class ForwardBackward(Forward):
    """Loss, outputs, and gradients that are gathered for the next step."""

    name = "forward_backward"
    usage_kind: UsageKind = "training"


def _logprob_bytes(datum: TrainDatum) -> int:
    """The bytes of a datum's logprobs in a result, which are dense where its targets are sparse."""
    return OUTPUT_BYTES + 4 * math.prod(datum.inputs["target_tokens"].shape)

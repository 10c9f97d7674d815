"""forward and forward_backward: training data through the model."""

from __future__ import annotations

import asyncio

import numpy as np

from tinkex.contract.losses import LOSSES, WEIGHTS
from tinkex.engine.jobs import CsrArray, Job, ModelInfo, Result, TracedLoss, TrainJob, TrainResult
from tinkex.errors import InvalidInputError
from tinkex.server.jobs import encode, validation
from tinkex.server.jobs.decode import TrainRequest, train_request
from tinkex.server.process.off_loop import off_loop
from tinkex.server.work.futures import Outcome
from tinkex.server.work.operation import Conclusion, Operation, OperationRun
from tinkex.store import Model, UsageCount, UsageKind, User
from tinkex.wire.generation import JSON, PROTOBUF
from tinkex.wire.requests import Opened

PROTO_BODY, JSON_BODY = b"P", b"J"
"""The first byte of a body in the journal: how to read the rest."""


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

    def identity(self, opened: Opened) -> bytes:
        """The body, the mark of its encoding in front."""
        return (PROTO_BODY if opened.is_protobuf else JSON_BODY) + opened.content

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> TrainRequest:
        info = await self.deps.catalog.info(model.base_model)
        checked = await off_loop(len(opened.content), self._judge, opened, info)
        if (loss := await self._custom_loss(checked, user.user_id)) is not None:
            await asyncio.to_thread(validation.check_traced_work, loss, checked.data)
        return checked

    def _judge(self, opened: Opened, info: ModelInfo | None) -> TrainRequest:
        checked = train_request(opened.read())
        validation.check_train(checked, info)
        return checked

    def pack(self, opened: Opened, checked: TrainRequest) -> bytes:
        # The bytes as they came, not what was made of them: a replay reads them by the same code.
        return self.identity(opened)

    def unpack(self, body: bytes, model: Model) -> TrainRequest:
        kind = PROTOBUF if body[:1] == PROTO_BODY else JSON
        return train_request(self.open(body[1:], kind).read())

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
        used = UsageCount(
            kind=self.usage_kind,
            count=result.num_tokens,
            user_id=model.user_id,
            session_id=model.session_id,
            model_id=model.model_id,
            base_model=model.base_model,
            project_id=run.project_id,
            key_id=run.key_id,
        )
        if self.changes_state:
            size = sum(datum.tokens.nbytes for datum in checked.data)
            weight = await off_loop(size, _weight_of, checked)
            await self.deps.curves.passed(model.model_id, result.metrics, weight)
            await self.deps.rollouts.trained(model.user_id, model.model_id, checked.data)
        outcome = Outcome(kind="train", payload=encode.train_payload(result))
        return Conclusion(outcome=outcome, usage=(used,))


class ForwardBackward(Forward):
    """Loss, outputs, and gradients that are gathered for the next step."""

    name = "forward_backward"
    usage_kind: UsageKind = "training"

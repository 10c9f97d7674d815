"""optim_step: apply the gathered gradients."""

from __future__ import annotations

import orjson

from tinkex.contract.optimizers import OptimizerParams
from tinkex.engine.jobs import Job, OptimJob, OptimResult, Result
from tinkex.server.jobs import encode, validation
from tinkex.server.work.futures import Outcome
from tinkex.server.work.operation import Conclusion, Operation, OperationRun, canonical
from tinkex.store import Model, User
from tinkex.types import OptimStepRequest
from tinkex.wire import json_codec
from tinkex.wire.requests import Opened


class OptimStep(Operation[OptimizerParams]):
    """Apply the gathered gradients, then clear them."""

    name = "optim_step"
    clears_gradients = True
    part_of_step = "optim_time_s"

    def identity(self, opened: Opened) -> bytes:
        names = ("adam_params", "optimizer_params", "optim_params")
        return canonical({name: opened.fields.get(name) for name in names})

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> OptimizerParams:
        return validation.optimizer_params(opened.read(), _kind(model))

    def pack(self, opened: Opened, checked: OptimizerParams) -> bytes:
        return self.identity(opened)

    def unpack(self, body: bytes, model: Model) -> OptimizerParams:
        fields = orjson.loads(body) | {"model_id": model.model_id}
        return validation.optimizer_params(json_codec.read(OptimStepRequest, fields), _kind(model))

    async def job(self, checked: OptimizerParams, run: OperationRun) -> OptimJob:
        return OptimJob(job_id=run.job_id, adapter_id=run.model.model_id, params=checked)

    async def conclude(
        self, checked: OptimizerParams, run: OperationRun, job: Job, result: Result
    ) -> Conclusion:
        assert isinstance(result, OptimResult)
        rate = float(getattr(checked, "learning_rate", 0.0))
        await self.deps.curves.stepped(run.model.model_id, result.metrics, rate)
        payload = encode.metrics_json(result.metrics)
        return Conclusion(outcome=Outcome(kind="json", payload=payload))


def _kind(model: Model) -> str:
    return str(model.optimizer_config.get("type", "adamw"))

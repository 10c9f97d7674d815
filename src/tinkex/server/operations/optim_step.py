"""optim_step: apply the gathered gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tinkex.engine.jobs import AdamParams, Job, MuonParams, OptimJob, OptimResult, Result
from tinkex.server import encode, validation
from tinkex.server.operations.operation import Conclusion, Opened, Operation, Turn, canonical
from tinkex.server.work.futures import Outcome
from tinkex.store import Model, User

Params = AdamParams | MuonParams


class OptimStep(Operation[Params]):
    """Apply the gathered gradients, then clear them."""

    name = "optim_step"
    changes_state = True
    is_barrier = False
    clears_gradients = True

    def identity(self, opened: Opened) -> bytes:
        names = ("adam_params", "optimizer_params")
        return canonical({name: opened.fields.get(name) for name in names})

    async def check(self, opened: Opened, model: Model, user: User, seq_id: int) -> Params:
        return _params(opened.fields, model)

    def pack(self, opened: Opened, asked: Params) -> bytes:
        return self.identity(opened)

    def unpack(self, body: bytes, model: Model) -> Params:
        return _params(orjson.loads(body), model)

    async def job(self, asked: Params, turn: Turn) -> OptimJob:
        return OptimJob(job_id=turn.job_id, adapter_id=turn.model.model_id, params=asked)

    async def conclude(self, asked: Params, turn: Turn, job: Job, result: Result) -> Conclusion:
        assert isinstance(result, OptimResult)
        payload = encode.metrics_json(result.metrics)
        return Conclusion(outcome=Outcome(kind="json", payload=payload))


def _params(body: Mapping[str, Any], model: Model) -> Params:
    kind = str(model.optimizer_config.get("type", "adamw"))
    params = validation.optimizer_params(body, kind)
    params.pop("type", None)
    return MuonParams(**params) if kind == "muon" else AdamParams(**params)

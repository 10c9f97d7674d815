"""The runs of a server, for its pages: a user's own."""

from __future__ import annotations

import time
from typing import Any

from tinkex.server.compat.chat_formats import ChatFormats
from tinkex.server.console.source import PAGE, Query, Source, age, resume, span
from tinkex.server.console.sparks import spark
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.curves import Course, Curve
from tinkex.server.runs.rollouts import told
from tinkex.server.service.service import Service
from tinkex.store import Checkpoint, Model, RunFilter, Session, User

LISTED = ("reward", "loss", "loss_per_token", "learning_rate", "tokens")
PARKED_S = 120.0
_NOT_SAVED = "training.save_state('name')  # save first; nothing of this run can be loaded yet"


class ServerRuns(Source):
    is_local = False

    def __init__(self, service: Service, chat_formats: ChatFormats) -> None:
        self._service = service
        self._chat_formats = chat_formats

    @property
    def is_ending(self) -> bool:
        return self._service.stopping.is_set()

    async def page(self, user: User, query: Query) -> dict[str, Any]:
        store = self._service.store
        wanted = RunFilter(
            search=query.search,
            tag=query.tag,
            base_model=query.model,
            status=query.status,
            busy=tuple(self._service.busy_models()),
            order=query.sort,
        )
        owner = None if query.everyone else user.user_id
        found = await store.call(store.models.filtered, owner, wanted, PAGE, query.page * PAGE)
        curves = await self._service.curves.of_runs([m.model_id for m in found.models], LISTED)
        return {
            "runs": [
                self._row(model, found.sessions.get(model.session_id), curves)
                for model in found.models
            ],
            "total": found.total,
            "pages": (found.total + PAGE - 1) // PAGE,
            "models": found.base_models,
        }

    def _row(
        self, model: Model, session: Session | None, curves: dict[tuple[str, str], Course]
    ) -> dict[str, Any]:
        reward, told, measured, rate, tokens = (
            curves.get((model.model_id, name)) for name in LISTED
        )
        # The loss of RL is near zero whatever happens; what a recipe logs as its loss is a mean,
        # however it weighs its tokens.
        shown = reward or told or measured
        return {
            **self._head(model, session),
            "steps": int(rate.last_step) if rate else 0,
            "metric": ("reward" if reward else "loss") if shown else None,
            "last": shown.last_value if shown else None,
            "tokens": int(tokens.total) if tokens else 0,
            "spark": spark(shown.values) if shown else "",
        }

    def _head(self, model: Model, session: Session | None) -> dict[str, Any]:
        status, why = self._status(model, session)
        return {
            "run_id": model.model_id,
            "name": (session.display_name if session else None) or model.model_id,
            "tags": list(session.tags) if session else [],
            "owner": model.user_id,
            "base_model": model.base_model,
            "rank": model.lora.get("rank"),
            "created_at": model.created_at,
            "age": age(model.created_at),
            "status": status,
            "why": why,
        }

    def _status(self, model: Model, session: Session | None) -> tuple[str, str]:
        doing = self._service.doing(model.model_id)
        if model.corrupted:
            return "lost", "its state could not be restored"
        if doing:
            is_waiting = doing.startswith(("waiting", "restoring", "the worker"))
            return ("waiting" if is_waiting else "running"), doing
        ended = session.status.get("type") if session else None
        if ended not in (None, "active"):
            return "finished", str(ended).replace("_", " ")
        if model.unloaded:
            return "finished", "unloaded"
        seen = max(model.last_request_time, session.last_heartbeat if session else 0)
        if time.time() - seen < PARKED_S:
            return "idle", "waiting for its client"
        return "parked", f"client last seen {age(seen)}"

    async def _model(self, user: User | None, run_id: str) -> Model:
        store = self._service.store
        model = await store.call(store.models.get, run_id)
        if model is None or (user is not None and model.user_id != user.user_id):
            raise ApiError(404, f"No run {run_id[:200]!r} of yours.")
        return model

    async def check(self, user: User | None, run_id: str) -> None:
        await self._model(user, run_id)

    async def run(self, user: User | None, run_id: str) -> dict[str, Any]:
        store = self._service.store
        model = await self._model(user, run_id)
        session = await store.call(store.sessions.get, model.session_id)
        checkpoints = await store.call(store.checkpoints.of_run, model.model_id)
        weights = [c for c in checkpoints if c.kind == "weights"]
        return {
            **self._head(model, session),
            "settings": {
                "base_model": model.base_model,
                **{f"lora.{key}": value for key, value in model.lora.items()},
                **{f"optimizer.{key}": value for key, value in model.optimizer_config.items()},
                **{f"metadata.{k}": v for k, v in (model.user_metadata or {}).items()},
                "sdk_version": session.sdk_version if session else "",
            },
            "checkpoints": [_checkpoint(one) for one in checkpoints],
            "resume": resume(weights[-1].path) if weights else _NOT_SAVED,
        }

    async def curves(self, run_id: str) -> dict[str, Curve]:
        return await self._service.curves.of_run(run_id)

    def doing(self, run_id: str) -> str:
        return self._service.doing(run_id)

    async def rollout_steps(self, run_id: str) -> list[int]:
        return self._service.rollouts.steps(run_id)

    async def rollouts(self, run_id: str, step: int) -> list[dict[str, Any]]:
        found = self._service.rollouts.at(run_id, step)
        return await told(found, await self._tokenizer(found[0].base_model)) if found else []

    async def _tokenizer(self, base_model: str) -> Any | None:
        try:
            return (await self._chat_formats.of(base_model)).tokenizer
        except ApiError:  # a model without one, such as the toy
            return None

    def agreement(self, user: User) -> bool | None:
        return self._service.rollouts.agreement(user.user_id)


def _checkpoint(one: Checkpoint) -> dict[str, Any]:
    return {
        "path": one.path,
        "kind": one.kind,
        "name": one.name,
        "size_bytes": one.size_bytes,
        "public": one.public,
        "age": age(one.created_at),
        "expires_at": one.expires_at,
        "expires": _until(one.expires_at),
    }


def _until(moment: float | None) -> str:
    if moment is None:
        return "never"
    return f"in {length}" if (length := span(moment - time.time())) else "soon"

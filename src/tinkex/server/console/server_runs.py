"""The runs of a server, for its pages: a user's own."""

from __future__ import annotations

import time
from typing import Any

from tinkex.server.compat.chat_formats import ChatFormats
from tinkex.server.console.colors import color_of
from tinkex.server.console.settings_view import flat
from tinkex.server.console.source import Query, Source, age, resume, span
from tinkex.server.console.sparks import spark
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.curves import Course, Curve
from tinkex.server.runs.descriptions import name_of, tags_of
from tinkex.server.runs.progress import LISTED, progress_of
from tinkex.server.runs.rollouts import told
from tinkex.server.runs.segments import courses_of, curves_of
from tinkex.server.runs.states import SILENT_S, state_of
from tinkex.server.service.service import Service
from tinkex.store import Checkpoint, Model, RunFilter, Session, User


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
            project=query.project,
            status=query.status,
            busy=tuple(self._service.busy_models()),
            silent_since=time.time() - SILENT_S,
            order=query.sort,
        )
        owner = None if query.everyone else user.user_id
        size = query.page_size
        found = await store.call(store.models.filtered, owner, wanted, size, query.page * size)
        curves = await courses_of(store, self._service.curves, found.models, (*LISTED, "tokens"))
        return {
            "runs": [
                self._row(model, found.sessions.get(model.session_id), curves, query)
                for model in found.models
            ],
            "total": found.total,
            "pages": (found.total + size - 1) // size,
            "models": found.base_models,
            "projects": found.projects,
        }

    def _row(
        self,
        model: Model,
        session: Session | None,
        curves: dict[tuple[str, str], Course],
        query: Query,
    ) -> dict[str, Any]:
        progress, tokens = progress_of(model, curves), curves.get((model.model_id, "tokens"))
        shown = progress.course
        return {
            **self._head(model, session),
            **(_settings(model, session) if query.view == "settings" else {}),
            "steps": progress.num_steps or 0,
            "metric": progress.metric,
            "last": shown.last_value if shown else None,
            "tokens": int(tokens.total) if tokens else 0,
            "spark": spark(shown.values) if shown else "",
        }

    def _head(self, model: Model, session: Session | None) -> dict[str, Any]:
        status, why = self._status(model, session)
        return {
            "run_id": model.model_id,
            "name": name_of(model, session) or model.model_id,
            "own_name": model.name or "",
            "tags": tags_of(model, session),
            "owner": model.user_id,
            "note": model.note or "",
            "project": (session.project_id if session else None) or "",
            "color": color_of(model.model_id),
            "base_model": model.base_model,
            "rank": model.lora.get("rank"),
            "created_at": model.created_at,
            "age": age(model.created_at),
            "status": status,
            "why": why,
        }

    def _status(self, model: Model, session: Session | None) -> tuple[str, str]:
        return state_of(model, session, self._service.doing(model.model_id))

    async def _model(self, user: User | None, run_id: str) -> Model:
        store = self._service.store
        model = await store.call(store.models.get, run_id)
        if model is None or (user is not None and model.user_id != user.user_id):
            raise ApiError(404, f"No run {run_id[:200]!r} of yours.")
        # The page of a run that was resumed is one, whichever of its segments was asked for.
        if model.continued_by is None:
            return model
        return await store.call(store.models.get, model.continued_by) or model

    async def check(self, user: User | None, run_id: str) -> None:
        await self._model(user, run_id)

    async def run(self, user: User | None, run_id: str) -> dict[str, Any]:
        store = self._service.store
        model = await self._model(user, run_id)
        session = await store.call(store.sessions.get, model.session_id)
        segments = await store.call(store.models.segments, model)
        checkpoints = [
            checkpoint
            for segment in reversed(segments)  # all of them newest first
            for checkpoint in await store.call(store.checkpoints.of_run, segment.model_id)
        ]
        weights = [c for c in checkpoints if c.kind == "weights"]
        return {
            **self._head(model, session),
            **_settings(model, session),
            "segments": [segment.model_id for segment in segments],
            "age": age(segments[0].created_at),
            "resumed_age": age(model.created_at),
            "checkpoints": [_checkpoint(one) for one in checkpoints],
            "resume": resume(weights[0].path) if weights else "",
        }

    async def curves(self, run_id: str) -> dict[str, Curve]:
        model = await self._model(None, run_id)
        return await curves_of(self._service.store, self._service.curves, model)

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

    async def base_models(self) -> list[str]:
        return list(self._service.catalog.names)

    def agreement(self, user: User) -> bool | None:
        return self._service.rollouts.agreement(user.user_id)


def _settings(model: Model, session: Session | None) -> dict[str, Any]:
    """The settings that the server knows by itself, and those that the run's program told."""
    own = dict(flat(model.settings or {}))
    return {
        "settings": {
            "base_model": model.base_model,
            **{f"lora.{key}": value for key, value in model.lora.items()},
            **{f"optimizer.{key}": value for key, value in model.optimizer_config.items()},
            **{f"metadata.{k}": v for k, v in (model.user_metadata or {}).items() if k != "name"},
            "sdk_version": session.sdk_version if session else "",
            **own,
        },
        "tells_settings": bool(own),
    }


def _checkpoint(one: Checkpoint) -> dict[str, Any]:
    return {
        "path": one.path,
        "kind": one.kind,
        "name": one.name,
        "step": one.num_steps,
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

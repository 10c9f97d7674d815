"""What the pages show, as plain data: the same for HTML and for JSON."""

from __future__ import annotations

import time
from typing import Any

from tinkex.server.console.sparks import spark
from tinkex.server.service import Service
from tinkex.server.work.curves import Curve
from tinkex.store import Checkpoint, Model, Session, User

LISTED = ("loss_per_token", "learning_rate", "tokens")
PAGE = 50


async def runs(service: Service, user: User, *, page: int = 0, search: str = "") -> dict[str, Any]:
    """One page of a user's runs, newest first."""
    store = service.store
    models, total = await store.call(
        store.models.page, user.user_id, PAGE, page * PAGE, search=search or None
    )
    ids = [model.model_id for model in models]
    curves = await service.curves.of_runs(ids, LISTED)
    sessions = await store.call(_sessions, service, models)
    rows = []
    for model in models:
        loss = curves.get((model.model_id, "loss_per_token"))
        rate = curves.get((model.model_id, "learning_rate"))
        tokens = curves.get((model.model_id, "tokens"))
        rows.append(
            {
                **_head(service, model, sessions.get(model.session_id)),
                "steps": int(rate.steps[-1]) if rate and rate.steps else 0,
                "loss": loss.values[-1] if loss and loss.values else None,
                "tokens": _total(tokens),
                "spark": spark(loss.values) if loss else "",
            }
        )
    return {"runs": rows, "total": total, "page": page, "pages": (total + PAGE - 1) // PAGE}


def _sessions(service: Service, models: list[Model]) -> dict[str, Session]:
    found = {}
    for session_id in {model.session_id for model in models}:
        session = service.store.sessions.get(session_id)
        if session is not None:
            found[session_id] = session
    return found


def _total(tokens: Curve | None) -> int:
    return int(sum(tokens.values) * tokens.stride) if tokens else 0


def _head(service: Service, model: Model, session: Session | None) -> dict[str, Any]:
    status, why = _status(service, model, session)
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


def _status(service: Service, model: Model, session: Session | None) -> tuple[str, str]:
    doing = service.doing(model.model_id)
    if model.corrupted:
        return "lost", "its state could not be restored"
    if doing:
        return ("running" if doing.startswith(("running", "forward")) else "working"), doing
    ended = session.status.get("type") if session else None
    if ended not in (None, "active"):
        return "finished", str(ended).replace("_", " ")
    if model.unloaded:
        return "finished", "unloaded"
    silent_s = time.time() - max(model.last_request_time, session.last_heartbeat if session else 0)
    return ("idle", "waiting for its client") if silent_s < 120 else ("parked", age_of(silent_s))


async def run(service: Service, user: User, model: Model) -> dict[str, Any]:
    """Everything about one run but its curves."""
    store = service.store
    session = await store.call(store.sessions.get, model.session_id)
    checkpoints = await store.call(store.checkpoints.of_run, model.model_id)
    weights = [c for c in checkpoints if c.kind == "weights"]
    return {
        **_head(service, model, session),
        "settings": {
            "base_model": model.base_model,
            **{f"lora.{key}": value for key, value in model.lora.items()},
            **{f"optimizer.{key}": value for key, value in model.optimizer_config.items()},
            **{f"metadata.{k}": v for k, v in (model.user_metadata or {}).items()},
            "sdk_version": session.sdk_version if session else "",
        },
        "checkpoints": [_checkpoint(one) for one in checkpoints],
        "resume": _resume(weights[-1].path if weights else None),
    }


def _resume(path: str | None) -> str:
    """The line of code that goes on from here."""
    if path is None:
        return "training.save_state('name')  # save first; nothing of this run can be loaded yet"
    return f"service.create_training_client_from_state_with_optimizer({path!r})"


def _checkpoint(one: Checkpoint) -> dict[str, Any]:
    return {
        "path": one.path,
        "kind": one.kind,
        "name": one.name,
        "size_bytes": one.size_bytes,
        "public": one.public,
        "age": age(one.created_at),
        "expires_at": one.expires_at,
    }


def curves(found: dict[str, Curve], after: dict[str, int] | None = None) -> dict[str, Any]:
    """Curves as JSON; with `after`, only those that grew since that many points."""
    told = {}
    for name, curve in sorted(found.items()):
        if after is None or after.get(name) != curve.num_made:
            told[name] = {
                "steps": curve.steps,
                "values": curve.values,
                "at": curve.moments,
                "made": curve.num_made,
            }
    return told


def age(moment: float) -> str:
    return age_of(time.time() - moment)


def age_of(seconds: float) -> str:
    for length, noun in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {noun}{'' if number == 1 else 's'} ago"
    return "just now"

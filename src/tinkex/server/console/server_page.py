"""The server's own page, for administrators: health, workers, queues, users, keys, usage, audit.

The acts are those of `administration/administration.py`, which `/tinkex/v1/admin` calls too; this
module shows them and takes forms. A key that is made is shown once, in the answer to its form.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel

from tinkex.contract.amounts import amount_of
from tinkex.server.administration.administration import Administration
from tinkex.server.console.run_pages import Number
from tinkex.server.console.shell import PageRoute, page
from tinkex.server.console.source import age
from tinkex.server.console.visitors import AdminVisitor, Changing
from tinkex.server.guard.auth import is_configured
from tinkex.server.guard.quotas import QUOTAS
from tinkex.server.http.dependencies import dependencies_of, service_of
from tinkex.server.http.handlers import answer
from tinkex.server.process.problems import ApiError
from tinkex.server.service.metrics import process_memory
from tinkex.server.workers.worker import Worker
from tinkex.store import AuditEntry, UsedBy
from tinkex.types.account.administration import KeyRole

router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
MAX_USERS = 50
MAX_KEYS = 50
MAX_AUDIT = 100
MAX_RUNS = 100
MAX_USED = 50
MAX_BUSY_USERS = 20
HELD = {
    "base": "Base model",
    "packed": "Packed copies",
    "kv": "KV cache",
    "adapters": "Adapters",
    "snapshots": "Snapshots",
}
"""What a worker's memory is for (`engine/heartbeat.py`), and what the page calls it."""
DAY_HOURS = 24
USED_BY: tuple[UsedBy, ...] = ("user", "key", "run")
Text = Annotated[str, Form(max_length=200)]


def _administration(request: Request) -> Administration:
    return dependencies_of(request).administration


Find = Annotated[str, Query(max_length=200)]


@router.get("/server")
async def server_page(
    request: Request, user: AdminVisitor, find: Find = "", users: Number = 0
) -> Response:
    return page(request, "server.html", user, **await _shown(request, find, users))


@router.get("/api/server")
async def server_json(
    request: Request,
    user: AdminVisitor,
    brief: Annotated[bool, Query()] = False,
    find: Find = "",
    users: Number = 0,
) -> Response:
    """Everything on the page; with `brief` only what moves."""
    return answer(await _moving(request) if brief else await _facts(request, find, users))


async def _facts(request: Request, find: str = "", users_page: int = 0) -> dict[str, Any]:
    """All but what moves. Asks the database a fixed number of questions, whoever there is."""
    administration = _administration(request)
    offset = users_page * MAX_USERS
    users, num_users = await administration.users(MAX_USERS, offset, search=find)
    keys, num_keys = await administration.newest_keys(MAX_KEYS, find)
    runs, num_busy = await administration.runs(MAX_RUNS, busy_only=True)
    return {
        "find": find,
        "users_page": users_page,
        "users_pages": (num_users + MAX_USERS - 1) // MAX_USERS,
        **await _moving(request),
        "users": _told(users),
        "num_users": num_users,
        "quotas": list(QUOTAS),
        "held_names": HELD,
        "keys": [
            {
                "key_id": key.key_id,
                "user_id": key.user_id,
                "name": key.name,
                "role": key.role,
                "is_configured": is_configured(key),
                "age": age(key.created_at),
            }
            for key in keys
        ],
        "num_keys": num_keys,
        "busy": _told(runs),
        "num_busy": num_busy,
        **await _usage(request),
        "audit": _folded(await administration.audit(MAX_AUDIT)),
    }


def _folded(entries: Iterable[AuditEntry]) -> list[dict[str, Any]]:
    """The audit log, the newest first; repeats of one event, wherever they stand, are one row.

    Logins are what is repeated: a program that starts often would push everything else away.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in entries:
        details = ", ".join(f"{k} {v}" for k, v in entry.details.items() if v != "")
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.timestamp))
        row = {"at": at, "user_id": entry.user_id, "event": entry.event, "details": details}
        kept = rows.setdefault((entry.user_id, entry.event, details), {**row, "times": 0})
        kept["times"] += 1
        kept["since"] = at
    return list(rows.values())


async def _shown(request: Request, find: str = "", users_page: int = 0) -> dict[str, Any]:
    """The facts, and the addresses that the page links to."""

    def users_address(number: int) -> str:
        given = {name: value for name, value in (("find", find), ("users", number)) if value}
        return f"/console/server?{urlencode(given)}"

    return {**await _facts(request, find, users_page), "users_address": users_address}


async def _moving(request: Request) -> dict[str, Any]:
    """Facts that change from moment to moment."""
    service = service_of(request)
    metrics = dependencies_of(request).metrics
    at, tokens = await _administration(request).tokens()
    workers = service.workers
    rollouts, kept = service.rollouts, service.kept
    free = await asyncio.to_thread(lambda: shutil.disk_usage(service.config.data_dir).free)
    return {
        "at": at,
        "since": time.strftime("%H:00 UTC", time.gmtime(at - 3600)),
        "trouble": workers.trouble(),
        "uptime_s": metrics.uptime_s,
        "workers": [
            {
                "name": member.name,
                "is_ready": member.is_ready,
                "is_moving": member.is_moving,
                "starts": member.generation,
                "memory_bytes": _process_bytes(member),
                "held_bytes": {kind: member.held_bytes.get(kind, 0) for kind in HELD},
            }
            for member in workers.pool.members
        ],
        "memory": {
            "API process": process_memory(),
            "unfetched results": kept.memory_bytes,
            "request bodies": dependencies_of(request).bodies.held_bytes,
            "rollouts": rollouts.kept_bytes,
        },
        "disk": {"free": free, "unfetched results": kept.kept_bytes},
        "queues": [
            {"name": name, "slots": gate.num_slots, "waiting": gate.num_waiting}
            for name, gate in (("training", workers.training), ("sampling", workers.sampling))
        ],
        "open_by_user": dict(
            sorted(service.open_work.by_user.items(), key=lambda one: -one[1])[:MAX_BUSY_USERS]
        ),
        "num_models": service.num_lanes,
        "tokens": tokens,
        "slow": [{**one, "age": age(one["at"])} for one in metrics.slow.told()],
    }


def _process_bytes(member: Worker) -> int:
    """As the worker says it itself, on whatever machine; before it did, as this machine knows."""
    return member.held_bytes.get("process") or process_memory(getattr(member, "pid", 0))


async def _usage(request: Request) -> dict[str, list[dict[str, Any]]]:
    """Usage of each user, key and run in the last day; most device time first."""
    administration = _administration(request)
    found = {by: await administration.usage(by, DAY_HOURS, MAX_USED) for by in USED_BY}
    return {f"usage_by_{by}": _told(used) for by, used in found.items()}


def _told(found: Iterable[BaseModel]) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json") for one in found]


# ------------------------------------------------------------------------------------ changes


def _back() -> Response:
    return RedirectResponse("/console/server", status_code=303)


@router.post("/server/keys")
async def add_key(
    request: Request,
    admin: AdminVisitor,
    _: Changing,
    user_id: Annotated[str, Form(min_length=1, max_length=200)],
    name: Text = "",
    role: Annotated[KeyRole, Form()] = "user",
) -> Response:
    key, made = await _administration(request).add_key(admin, user_id.strip(), name=name, role=role)
    return page(request, "server.html", admin, new_key=key, made=made, **await _shown(request))


@router.post("/server/keys/revoke")
async def revoke_key(
    request: Request,
    admin: AdminVisitor,
    _: Changing,
    key_id: Annotated[int, Form(ge=0, le=2**31 - 1)],
) -> Response:
    await _administration(request).revoke_key(admin, key_id)
    return _back()


@router.post("/server/users")
async def change_user(
    request: Request,
    admin: AdminVisitor,
    _: Changing,
    user_id: Text,
    action: Text,
    reason: Annotated[str, Form(max_length=1000)] = "",
) -> Response:
    """End a user's work, refuse the user, or let them in again."""
    administration = _administration(request)
    if action == "stop":
        await administration.stop_user(admin, user_id, reason)
    elif action == "disable":
        await administration.disable(admin, user_id, reason)
    elif action == "enable":
        await administration.enable(admin, user_id)
    else:
        raise ApiError(400, f"No action {action[:40]!r}; use stop, disable or enable.")
    return _back()


@router.post("/server/quotas")
async def set_quota(
    request: Request,
    admin: AdminVisitor,
    _: Changing,
    user_id: Text,
    name: Text,
    limit: Annotated[str, Form(max_length=30)] = "",
) -> Response:
    """Set a limit of one user; an empty one goes back to the server's own."""
    await _administration(request).set_quotas(admin, user_id, {name: _amount(limit)})
    return _back()


def _amount(text: str) -> float | None:
    if not text.strip():
        return None
    value = amount_of(text.strip())
    if not 0 <= value <= 2**62:
        raise ApiError(400, f"A limit is a number of at least 0, such as 5M; got {text[:30]!r}.")
    return value


@router.post("/server/runs/stop")
async def stop_run(request: Request, admin: AdminVisitor, _: Changing, run_id: Text) -> Response:
    await _administration(request).stop_run(admin, run_id)
    return _back()

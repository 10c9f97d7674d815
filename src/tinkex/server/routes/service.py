"""The first calls of every client, sessions and their heartbeats, and what operators look at."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from tinkex.contract.sampling import EXTENSIONS
from tinkex.errors import InvalidInputError
from tinkex.server.guard.auth import CALLER
from tinkex.server.guard.quotas import Quotas
from tinkex.server.http.dependencies import AppDependencies, dependencies_of, service_of
from tinkex.server.http.handlers import Answer, answer, serve
from tinkex.server.process.presence import Presence
from tinkex.server.process.problems import problem
from tinkex.server.service.metrics import ServerMetrics
from tinkex.server.service.service import Service
from tinkex.store import User
from tinkex.types import (
    ClientConfigRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SupportedModel,
    TelemetryResponse,
    TelemetrySendRequest,
)
from tinkex.types.service.extensions import ProcessRequest
from tinkex.wire import results

router = APIRouter()
api = APIRouter(prefix="/api/v1", tags=["service"])
_ALIVE = results.encode(SessionHeartbeatResponse()).content

# Only what really works is switched on; everything left out keeps the client's default.
CLIENT_CONFIG: dict[str, Any] = {
    "pjwt_auth_enabled": True,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
    "tinkex_sample_batch": True,
    "tinkex_sample_stream": True,
    "tinkex_sampling_params": ",".join(EXTENSIONS),
    "tinkex_routed_experts": True,
    "tinkex_teacher": True,
}
DYNAMIC_CONFIG: dict[str, Any] = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


# ------------------------------------------------------------------------------------ operators


@router.get("/healthz", tags=["operators"])
@router.get("/api/v1/healthz", tags=["operators"])
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", tags=["operators"])
async def readyz(request: Request) -> Response:
    """There is a worker that takes jobs and gets on with those it has."""
    service = service_of(request)
    trouble = "the server is stopping" if service.stopping.is_set() else service.workers.trouble()
    if not trouble:
        return answer({"status": "ready"})
    return problem(503, f"Not ready: {trouble}. Try again in a moment.")


@router.get("/metrics", tags=["operators"])
async def metrics(request: Request) -> Response:
    """Prometheus text; with an admin or metrics key, what each user does besides."""
    parts, caller = dependencies_of(request), request.scope[CALLER]
    text = parts.metrics.render(
        parts.service, with_users=caller.sees_users, **_of_this_process(parts)
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _of_this_process(parts: AppDependencies) -> dict[str, float]:
    values = {"held_body_bytes": float(parts.bodies.held_bytes)}
    if (limits := parts.connections) is not None:
        values |= {"connections": limits.num_open, "connections_refused": limits.num_refused}
    return values


@serve(router, "attach", tags=["local"])
async def attach(presence: Presence, asked: ProcessRequest) -> dict[str, str]:
    """A process on this machine uses the server: keep it alive while the process lives."""
    presence.attach(asked.pid)
    return {"status": "ok"}


@serve(router, "detach", tags=["local"])
async def detach(presence: Presence, asked: ProcessRequest) -> dict[str, str]:
    presence.detach(asked.pid)
    return {"status": "ok"}


# ------------------------------------------------------------------------------------ clients


@serve(api, "client_config")
async def client_config(service: Service, asked: ClientConfigRequest) -> dict[str, Any]:
    return {**CLIENT_CONFIG, "custom_loss_server_side": service.config.engine_kind.custom_losses}


@serve(api, "client_dynamic_config")
async def dynamic_config(asked: ClientConfigRequest) -> dict[str, Any]:
    return DYNAMIC_CONFIG


@serve(api, "get_server_capabilities")
async def get_server_capabilities(service: Service) -> GetServerCapabilitiesResponse:
    models = []
    for name in service.catalog.names:
        try:
            info = await service.catalog.info(name, timeout_s=20)
        except InvalidInputError:
            continue
        models.append(
            SupportedModel(
                model_name=name,
                max_context_length=info.max_context_length if info else None,
                trainable=True,
                sampleable=True,
                note=(info.note or None) if info else None,
                stands_in=(info.stands_in or None) if info else None,
            )
        )
    return GetServerCapabilitiesResponse(supported_models=models)


@serve(api, "create_session")
async def create_session(
    service: Service, quotas: Quotas, user: User, asked: CreateSessionRequest
) -> CreateSessionResponse:
    async with quotas.one_more(user.user_id, "sessions"):
        session = await service.sessions.create(user, asked)
    return CreateSessionResponse(session_id=session.session_id)


@serve(api, "session_heartbeat")
async def session_heartbeat(
    service: Service, user: User, asked: SessionHeartbeatRequest
) -> Response:
    await service.sessions.heartbeat(user, asked.session_id)
    return Answer(_ALIVE)


@serve(api, "telemetry")
async def telemetry(metrics: ServerMetrics, asked: TelemetrySendRequest) -> TelemetryResponse:
    """Count what clients report. Events are not kept: they may hold what users would not share."""
    metrics.count_telemetry(str(event.severity) for event in asked.events)
    return TelemetryResponse(status="accepted")

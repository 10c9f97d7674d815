"""Health and the first calls of every client: configuration and presence."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

router = APIRouter()

CLIENT_CONFIG: dict[str, Any] = {
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": True,
    "tinkex_sample_batch": True,
    "tinkex_sample_stream": True,
}
DYNAMIC_CONFIG: dict[str, Any] = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


@router.get("/healthz")
@router.get("/api/v1/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/api/v1/client/config")
async def client_config(request: Request) -> dict[str, Any]:
    return CLIENT_CONFIG


@router.post("/api/v1/client/dynamic_config")
async def dynamic_config(request: Request) -> dict[str, Any]:
    return DYNAMIC_CONFIG


@router.post("/tinkex/v1/attach")
async def attach(request: Request) -> dict[str, Any]:
    body = await request.json()
    request.app.state.presence.attach(int(body["pid"]))
    return {"status": "ok"}


@router.post("/tinkex/v1/detach")
async def detach(request: Request) -> dict[str, Any]:
    body = await request.json()
    request.app.state.presence.detach(int(body["pid"]))
    return {"status": "ok"}

"""`/log_metrics`: numbers that a client measures itself, drawn beside those of the server."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tinkex.server.auth import CurrentUser
from tinkex.server.exchange import answer, read, serve, service_of
from tinkex.types.service.extensions import LogMetricsRequest, LogMetricsResponse

router = APIRouter(prefix="/api/v1", tags=["runs"])


@serve(router, "log_metrics")
async def log_metrics(request: Request, user: CurrentUser) -> Response:
    service = service_of(request)
    asked: LogMetricsRequest = await read(request, "log_metrics")
    model = await service.model(user, asked.model_id)
    await service.curves.log(model.model_id, asked.metrics, asked.step)
    return answer(LogMetricsResponse())

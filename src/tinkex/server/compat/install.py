"""Put the endpoints of other APIs on an application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from tinkex.server.compat import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
    records,
)
from tinkex.server.compat.chat_formats import ChatFormats
from tinkex.server.compat.dependencies import CompatDependencies
from tinkex.server.compat.model_names import ModelNames
from tinkex.server.compat.trajectories import TrajectoryRecorder
from tinkex.server.guard.callers import ANTHROPIC, PREFIXES
from tinkex.server.sandbox.sandbox import Sandbox
from tinkex.server.service.service import Service
from tinkex.store import User

_MODULES = (openai_chat, openai_completions, openai_responses)


def endpoints() -> dict[str, Callable[[Request, User], Awaitable[Response]]]:
    """Handlers of POST requests by their paths; each takes (request, user)."""
    routers = [(prefix, module.router) for prefix in PREFIXES for module in _MODULES]
    return {
        f"{prefix}{route.path}": route.endpoint
        for prefix, router in (*routers, *((p, anthropic_messages.router) for p in ("", ANTHROPIC)))
        for route in router.routes
        if isinstance(route, APIRoute) and route.methods == {"POST"}
    }


def install(app: FastAPI, service: Service, sandbox: Sandbox) -> CompatDependencies:
    """Mount the routes; sets `compat` on `app.state`."""
    compat = app.state.compat = CompatDependencies(
        ModelNames(service),
        ChatFormats(service.catalog, sandbox),
        TrajectoryRecorder(service.store, service.shelf),
    )
    app.router.routes += _routes()
    return compat


@cache
def _routes() -> list[BaseRoute]:
    """The routes at all their prefixes: the same objects for every app, so resolved once."""
    router = APIRouter()
    for prefix in PREFIXES:
        for module in _MODULES:
            router.include_router(module.router, prefix=prefix, include_in_schema=prefix == "/v1")
    router.include_router(anthropic_messages.router)
    router.include_router(anthropic_messages.router, prefix=ANTHROPIC, include_in_schema=False)
    router.add_api_route(
        f"{ANTHROPIC}/v1/models", openai_chat.list_models, methods=["GET"], include_in_schema=False
    )
    router.include_router(records.router)
    return router.routes

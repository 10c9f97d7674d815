"""Put the endpoints of other APIs on an application."""

from __future__ import annotations

from fastapi import FastAPI

from tinkex.server.compat import (
    anthropic_messages,
    openai_chat,
    openai_completions,
    openai_responses,
    records,
)
from tinkex.server.compat.names import Names
from tinkex.server.compat.refusals import PREFIXES
from tinkex.server.compat.trajectories import Trajectories
from tinkex.server.compat.voices import Voices
from tinkex.server.service import Service


def install(app: FastAPI, service: Service) -> None:
    """Mount the routes; sets `names`, `voices` and `trajectories` on `app.state`."""
    app.state.names = Names(service)
    app.state.voices = Voices(service.catalog)
    app.state.trajectories = Trajectories(service.store, service.shelf)
    for prefix in PREFIXES:
        for module in (openai_chat, openai_completions, openai_responses):
            app.include_router(module.router, prefix=prefix, include_in_schema=prefix == "/v1")
    app.include_router(anthropic_messages.router)
    app.include_router(records.router)

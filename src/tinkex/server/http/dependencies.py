"""The parts of a running server that handlers need, made once by `create_app`.

A handler names the parts it wants as parameters (`http.handlers.serve`), or asks
`dependencies_of(request)`. The rooms above this one keep parts of their own in the same way:
`compat.dependencies` and `console.source`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Request

from tinkex.server.administration.administration import Administration
from tinkex.server.fairness.gate import FairGate
from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.signing import Signer
from tinkex.server.guard.auth import Auth
from tinkex.server.guard.connections import ConnectionLimits
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.limits import BodyBudget
from tinkex.server.guard.quotas import Quotas
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.presence import Presence
from tinkex.server.sandbox.sandbox import Sandbox
from tinkex.server.service.metrics import ServerMetrics
from tinkex.server.service.service import Service
from tinkex.store import Store

READING_AT_ONCE = 2
"""Bodies of many parts that are parsed and checked at a time."""
DRAWING_AT_ONCE = 2
"""Answers made of very many rows or points, traces and curves, that are made at a time."""


@dataclass(slots=True, kw_only=True)
class AppDependencies:
    config: ServerConfig
    store: Store
    shelf: Shelf
    signer: Signer
    service: Service
    auth: Auth
    quotas: Quotas
    failed_logins: FailedLogins
    administration: Administration
    presence: Presence
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    bodies: BodyBudget
    """Bytes of bodies as they were sent, and unpacked."""
    parsed_bodies: BodyBudget
    """Bytes of the objects that JSON bodies became."""
    sandbox: Sandbox = field(default_factory=Sandbox)
    """Unpacks and renders what strangers sent."""
    reading: FairGate = field(default_factory=lambda: FairGate(READING_AT_ONCE))
    """Turns for parsing bodies of many parts."""
    drawing: FairGate = field(default_factory=lambda: FairGate(DRAWING_AT_ONCE))
    """Turns for making traces, curves and lists without pages."""
    connections: ConnectionLimits | None = None
    """None where there is no socket, as in tests over an in-process transport."""


def dependencies_of(request: Request) -> AppDependencies:
    dependencies: AppDependencies = request.scope["app"].state.dependencies
    return dependencies


def service_of(request: Request) -> Service:
    return dependencies_of(request).service

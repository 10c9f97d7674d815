"""Anything at all sent to the REST routes is answered, and wrong input is the caller's fault.

schemathesis reads the OpenAPI schema and makes valid and invalid requests for every operation.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from rest_world import KEYS, World, open_world
from schemathesis import Case, GenerationMode
from store_rows import model, session
from wire_client import check_error
from wrong_values import wrong_versions

from tinkex.server.app import REST

MANY = 60
FEW = 3
PATH = "tinker://s:train:0/weights/first"
ONE = "/training_runs/s:train:0/checkpoints/weights/first"
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/weights_info", {"tinker_path": PATH}),
    ("PUT", f"{ONE}/ttl", {"ttl_seconds": 7200}),
    ("PUT", "/sessions/s/project", {"project_id": "p"}),
    ("POST", "/sessions/s/finish", {"reason": {"type": "success"}, "detail": "x"}),
    (
        "POST",
        "/copy_weights",
        {"source_path": PATH, "destination_project_id": "p", "weights_access_token": "x"},
    ),
    (
        "POST",
        "/sessions/search",
        {
            "session_id": "s",
            "project_ids": ["p"],
            "user_metadata": {"k": "v"},
            "display_name": "x",
            "owner": {"type": "user", "owner_urns": ["u"]},
            "statuses": [{"type": "client_finished", "reasons": ["success"]}],
            "limit": 5,
            "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "a"},
        },
    ),
]


def operations(app: FastAPI) -> list[tuple[str, object]]:
    """Every one of REST but the import, which needs a worker; it has tests with one."""
    tags = sorted({str(tag) for module in REST for tag in module.router.tags})
    # Without our additions to the document: bodies are made wrong field by field, above.
    schema = schemathesis.openapi.from_dict(FastAPI.openapi(app)).include(tag=tags)
    schema = schema.exclude(path="/api/v1/checkpoints/import")
    return [(found.ok().label, found.ok()) for found in schema.get_all_operations()]


async def test_each_field_of_each_body_made_wrong_is_refused(world: World) -> None:
    await world.save()
    for method, path, body in BODIES:
        for what, wrong in wrong_versions(body):
            answer = await world.http.request(
                method, f"/api/v1{path}", json=wrong, headers={"x-api-key": "tml-ann"}
            )
            assert answer.status_code < 500, f"{path} {what}: {answer.text}"
            if answer.status_code >= 400:
                check_error(answer)


@pytest.mark.parametrize(
    ("mode", "num_cases"),
    [
        (GenerationMode.POSITIVE, FEW),
        pytest.param(GenerationMode.POSITIVE, MANY, marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, MANY, marks=pytest.mark.slow),
    ],
)
def test_no_request_makes_the_server_fail(
    tmp_path: Path, mode: GenerationMode, num_cases: int
) -> None:
    """Never a 5xx; every refusal has the one error body; and the server still works after."""
    with asyncio.Runner() as runner:
        opened = open_world(tmp_path, KEYS)
        world = runner.run(opened.__aenter__())
        world.store.sessions.create(session())
        world.store.models.create(model())
        labels = []
        for label, operation in operations(world.app):
            labels.append(label)
            _hammer(runner, world, operation, mode, num_cases)
        assert len(labels) >= 22, labels
        assert runner.run(world.call("GET", "/sessions", 200))["sessions"] is not None
        runner.run(opened.__aexit__())


def _hammer(
    runner: asyncio.Runner, world: World, operation: object, mode: GenerationMode, num_cases: int
) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))  # type: ignore[attr-defined]
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    def send(case: Case) -> None:
        runner.run(_send(world, case))

    try:
        send()
    except Unsatisfiable:  # Nothing can be wrong about a call without parameters.
        assert mode is GenerationMode.NEGATIVE


async def _send(world: World, case: Case) -> None:
    request = case.as_transport_kwargs(base_url="http://localhost")
    kept = {"method", "url", "params", "headers", "cookies", "json", "data"}
    known = {name: value for name, value in request.items() if name in kept}
    known["headers"] = {**dict(known.get("headers") or {}), "x-api-key": "tml-ann"}
    known.pop("cookies", None)
    body = known.pop("data", None)
    answer = await world.http.request(**known, content=body)
    assert answer.status_code < 500, f"{case.method} {answer.url}: {answer.text}"
    if answer.status_code >= 400:
        assert int(answer.headers["content-length"]) == len(answer.content) > 0
        assert answer.json()["detail"]

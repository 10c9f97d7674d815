"""Operators see what each user and each worker takes; users see no other's name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from app_world import AppWorld, open_app

from tinkex.engine.heartbeat import KINDS, Heartbeat, look
from tinkex.server.service.metrics import MAX_USERS, ServerMetrics

KEYS = ("tml-ann=ann", "tml-bob=bob")


async def _metrics(world: AppWorld, key: str) -> str:
    return (await world.http.get("/metrics", headers={"x-api-key": key})).text


async def test_only_an_admin_sees_who_does_what(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        accounts = world.service.store.accounts
        await asyncio.to_thread(accounts.ensure_user, "root")
        await asyncio.to_thread(accounts.add_key, "tml-root", "root", role="admin")
        await world.model(key="tml-bob")
        seen, told = await _metrics(world, "tml-ann"), await _metrics(world, "tml-root")
        assert 'user="bob"' not in seen
        assert 'tinkex_user_requests_total{status="2xx",user="bob"}' in told
        assert 'tinkex_user_open_requests{user="bob"} 0.0' in told
        for name in ("loop_lag_seconds", "disk_free_bytes", "memory_bytes"):
            assert f"tinkex_{name} " in seen


async def test_a_metrics_key_reads_metrics_and_nothing_else(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        accounts = world.service.store.accounts
        await asyncio.to_thread(accounts.ensure_user, "prometheus")
        await asyncio.to_thread(accounts.add_key, "tml-watch", "prometheus", role="metrics")
        model = await world.model(key="tml-bob")
        assert 'tinkex_user_open_requests{user="bob"} 0.0' in await _metrics(world, "tml-watch")
        bearer = {"authorization": "Bearer tml-watch"}
        assert (await world.http.get("/metrics", headers=bearer)).status_code == 200
        for method, path in (
            ("POST", "/api/v1/create_session"),
            ("POST", "/api/v1/auth/token"),
            ("GET", "/api/v1/sessions"),
            ("GET", f"/api/v1/training_runs/{model}"),
            ("GET", "/v1/models"),
            ("GET", "/tinkex/v1/admin/users"),
            ("GET", "/console/api/runs"),
            ("GET", "/docs"),
            ("GET", "/openapi.json"),
        ):
            headers = {"x-api-key": "tml-watch"}
            refused = await world.http.request(method, path, headers=headers, json={})
            assert refused.status_code == 403, path
            assert "/metrics and nothing else" in refused.text, path
        login = await world.http.post("/console/login", data={"key": "tml-watch"})
        assert (login.status_code, "set-cookie" in login.headers) == (403, False)


async def test_each_worker_says_what_its_memory_is_for(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        await world.facts()
        told = await _metrics(world, "tml-ann")
        for kind in KINDS:
            assert f'tinkex_worker_memory_bytes{{kind="{kind}",worker=' in told


def test_the_number_of_named_users_has_a_bound() -> None:
    metrics = ServerMetrics()
    for number in range(MAX_USERS + 50):
        metrics.observe("/x", 200, 0.1, f"user{number}")
    assert {metrics._name_of(f"user{n}") for n in range(MAX_USERS, MAX_USERS + 50)} == {"other"}
    assert len({key for key in metrics._answered_users.counts if key[1] == 2}) == MAX_USERS + 1


def test_memory_travels_with_the_pulse() -> None:
    heartbeat, memory = Heartbeat(), memoryview(bytearray(4096))
    heartbeat._memory = memory
    heartbeat.hold(base=5, kv=2**40)
    with heartbeat.work(*(f"job{n}" * 50 for n in range(100))):
        held = dict(zip(KINDS, look(memory).held_bytes, strict=True))
    assert (held["base"], held["kv"], held["snapshots"]) == (5, 2**40, 0)

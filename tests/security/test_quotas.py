"""What one user may hold, and how often a stranger may knock."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from app_world import open_app
from patience import PATIENCE_S
from server_process import ServerProcess

import tinkex
from tinkex.errors import ConfigError
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.quotas import Quotas, read_quotas
from tinkex.server.process.config import ServerConfig, load_config
from tinkex.server.process.problems import ApiError
from tinkex.store import User

KEYS = ("tml-ann=ann", "tml-bob=bob")
BODY = {"tags": [], "sdk_version": "test"}


async def test_sessions_models_and_disk_of_a_user_have_limits(tmp_path: Path) -> None:
    limits = {"max_user_sessions": 3, "max_user_models": 1, "max_user_disk_bytes": 5000}
    async with open_app(tmp_path, api_keys=KEYS, **limits) as world:
        model = await world.model(key="tml-ann")
        create = {"session_id": model.split(":")[0], "model_seq_id": 1, "base_model": "toy"}
        answer = await world.post("create_model", create, key="tml-ann")
        assert (answer.status_code, answer.json()["code"]) == (429, "quota")
        assert "Unload models" in answer.json()["detail"]
        save = {"model_id": model, "seq_id": 1, "path": "large", "user_metadata": {"x": "x" * 5000}}
        answer = await world.post("save_weights", save, key="tml-ann")
        assert (answer.status_code, answer.json()["code"]) == (400, "quota")
        assert "Your disk quota on this server is 0.005 MB" in answer.json()["detail"]
        statuses = [
            (await world.post("create_session", BODY, key="tml-ann")).status_code for _ in range(4)
        ]
        assert statuses == [200, 200, 429, 429]
        assert (await world.post("create_session", BODY, key="tml-bob")).status_code == 200


def test_a_quota_that_waiting_cannot_cure_is_raised_at_once_with_one_piece_of_advice(
    tmp_path: Path,
) -> None:
    with ServerProcess(tmp_path, "--engine", "toy", "--quota", "models=1") as server:
        with tinkex.ServiceClient(base_url=server.base_url) as service:
            service.create_lora_training_client("toy", rank=4)
            began = time.monotonic()
            with pytest.raises(tinkex.RateLimitError, match="Unload models") as caught:
                service.create_lora_training_client("toy", rank=4)
            assert time.monotonic() - began < PATIENCE_S  # trying again takes 300 s
    assert not caught.value.retryable
    assert "Slow down" not in str(caught.value)


def test_requests_a_second_have_a_limit_and_a_burst() -> None:
    now = 100.0
    config = ServerConfig(max_user_requests_per_minute=120.0)
    quotas = Quotas(None, config, clock=lambda: now)  # type: ignore[arg-type]

    def refused(count: int, user_id: str = "ann", key_id: int = 1, rate: float = 0.0) -> int:
        failed, who = 0, {"user_id": user_id, "name": "", "email": "", "created_at": 0.0}
        for _ in range(count):
            try:
                quotas.spend(User(**who, key_id=key_id, key_requests_per_minute=rate))
            except ApiError as exc:
                failed += exc.status == 429
        return failed

    assert refused(25) == 5
    assert refused(1, "bob") == 0
    now += 2.0
    assert refused(5) == 1
    assert refused(1, key_id=2) == 1, "a second key doubles nothing"
    now += 100.0
    assert refused(6, key_id=3, rate=24.0) == 2, "a key may have less than its user"
    assert refused(17) == 1, "what a key was refused is not counted"
    assert refused(1, "key 3") == 0, "no name of a user is that of a key's count"


async def test_a_key_has_a_rate_of_its_own_and_so_have_its_tokens(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        world.parts.quotas._clock = lambda: 0.0
        accounts = world.service.store.accounts
        await world.service.store.call(accounts.ensure_user, "root")
        await world.service.store.call(accounts.add_key, "tml-root", "root", role="admin")
        asked = {"user_id": "ann", "name": "ci", "requests_per_minute": 12}
        root = {"x-api-key": "tml-root"}
        url = "/tinkex/v1/admin/keys"
        made = (await world.http.post(url, json=asked, headers=root)).json()
        token = (await world.post("auth/token", {}, key=made["key"])).json()["jwt"]
        statuses = [
            (await world.post("create_session", BODY, key=key)).status_code
            for key in (token, made["key"], token, "tml-ann")
        ]
        assert statuses == [200, 429, 429, 200]
        (told,) = [
            key
            for key in (await world.http.get(url, headers=root)).json()["keys"]
            if key["key_id"] == made["key_id"]
        ]
        assert told["requests_per_minute"] == 12


def test_quotas_are_read_from_flags_and_nonsense_is_refused() -> None:
    read = read_quotas(["disk_bytes=50G", "models=3", "requests_per_minute=0.5"])
    config = load_config(env={}, flags=read)
    assert config.max_user_disk_bytes == 50 * 10**9
    assert (config.max_user_models, config.max_user_requests_per_minute) == (3, 0.5)
    for entry in ("cats=1", "models", "models=", "models=x", "models=-1", "models=nan", "=1"):
        with pytest.raises(ConfigError, match="disk_bytes"):
            read_quotas([entry])


async def test_nothing_new_is_stored_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        session = await world.session()
        world.service.room._free_bytes = lambda folder: 0
        world.service.room._looked_at = -10.0
        for path in ("create_session", "create_custom_loss", "checkpoints/import", "asample"):
            assert (await world.post(path, BODY)).status_code == 507, path
        beat = await world.post("session_heartbeat", {"session_id": session})
        assert beat.status_code == 200


async def test_unknown_keys_are_put_off_and_known_ones_are_not(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        world.parts.failed_logins._clock = lambda: 0.0  # it is the same minute, however slow we are
        statuses = {
            (await world.post("create_session", BODY, key=f"tml-{n}")).status_code
            for n in range(FailedLogins.MAX_A_MINUTE + 5)
        }
        assert statuses == {401, 429}
        assert (await world.post("create_session", BODY, key="tml-ann")).status_code == 200


@pytest.mark.parametrize("way", ["login", "enter", "cookie", "header"])
async def test_keys_tried_at_the_console_count_like_all_others(tmp_path: Path, way: str) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        world.parts.failed_logins._clock = lambda: 0.0

        async def knock(key: str) -> httpx.Response:
            if way == "login":
                return await world.http.post("/console/login", data={"key": key})
            if way == "enter":
                return await world.http.get("/console/enter", params={"token": key})
            name = "cookie" if way == "cookie" else "x-api-key"
            value = f"tinkex_console_0={key}" if way == "cookie" else key
            return await world.http.get("/console/api/runs", headers={name: value})

        tried = [await knock(f"tml-{n}") for n in range(FailedLogins.MAX_A_MINUTE + 2)]
        assert {answer.status_code for answer in tried[: FailedLogins.MAX_A_MINUTE]} <= {401, 303}
        assert [answer.status_code for answer in tried[-2:]] == [429, 429]
        assert "Wait a minute" in tried[-1].text
        assert (await world.post("create_session", BODY, key="tml-x")).status_code == 429
        if way != "enter":
            assert (await knock("tml-ann")).status_code in (200, 303), "a valid key is served"


async def test_a_visitor_without_a_key_is_sent_to_the_login_however_often(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        for _ in range(FailedLogins.MAX_A_MINUTE + 5):
            assert (await world.http.get("/console")).status_code == 303


async def test_what_operators_look_at_asks_for_a_key_too(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert (await world.http.get("/docs/oauth2-redirect")).status_code == 404
        for path in ("/metrics", "/docs", "/redoc", "/openapi.json"):
            assert (await world.http.get(path)).status_code == 401
            bearer = {"authorization": "Bearer tml-ann"}
            assert (await world.http.get(path, headers=bearer)).status_code == 200
        assert (await world.http.get("/healthz")).status_code == 200


async def test_the_audit_log_has_an_end(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        audit = world.service.store.audit
        audit.record("ann", "key_added", {})
        world.service.store.flush()
        await world.service.store.call(audit.forget, time.time() - 100)
        assert len(audit.entries("ann", prefixes=None, start=0, end=time.time() + 1)) == 1
        await world.service.store.call(audit.forget, time.time() + 100)
        assert audit.entries("ann", prefixes=None, start=0, end=time.time() + 1) == []

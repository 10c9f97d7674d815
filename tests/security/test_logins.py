"""Logins of the console and tokens of others: from where they come, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from app_world import AppWorld, open_app
from patience import soon
from wire_client import save_body

from tinkex.errors import ConfigError
from tinkex.server.guard.auth import LOGOUT, MAX_ENDED_OF_USER
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.process.config import ServerConfig
from tinkex.server.process.problems import ApiError

ANN, BOB = "tml-ann", "tml-bob"
KEYS = (f"{ANN}=ann", f"{BOB}=bob")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        yield world


async def _log_in(world: AppWorld, **headers: str) -> httpx.Response:
    return await world.http.post("/console/login", data={"key": ANN}, headers=headers)


def _cookie_of(answer: httpx.Response) -> dict[str, str]:
    return {"cookie": answer.headers["set-cookie"].split(";")[0]}


async def _enter(world: AppWorld, token: str, **headers: str) -> httpx.Response:
    return await world.http.get("/console/enter", params={"token": token}, headers=headers)


async def _token(world: AppWorld, key: str = ANN) -> str:
    answer = await world.http.post("/api/v1/auth/token", headers={"x-api-key": key})
    return str(answer.json()["jwt"])


async def test_a_page_of_another_site_logs_nobody_in(world: AppWorld) -> None:
    """It would choose whose account its reader works in."""
    token = await _token(world)
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost"},
    ):
        for answer in (await _log_in(world, **headers), await _enter(world, token, **headers)):
            assert answer.status_code == 403, headers
            assert "set-cookie" not in answer.headers
    for headers in (
        {"origin": "http://localhost"},
        {"sec-fetch-site": "same-origin", "origin": "https://as.the.proxy.calls.us"},
        {"sec-fetch-site": "none"},
        {},
    ):
        for answer in (await _log_in(world, **headers), await _enter(world, token, **headers)):
            assert "set-cookie" in answer.headers, (headers, answer.text)


async def test_a_link_takes_a_token_and_never_a_key(world: AppWorld) -> None:
    """Addresses are kept by browsers and written to logs."""
    answer = await _enter(world, ANN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert "set-cookie" not in answer.headers


async def test_a_cookie_ends_with_the_logout_wherever_it_was_copied_to(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        mine, other = [_cookie_of(await _log_in(world)) for _ in range(2)]
        world.http.cookies.clear()
        page = await world.http.get("/console", headers=mine)
        assert page.status_code == 200
        form = page.text.split('name="form-token" content="')[1].split('"')[0]
        await world.http.post("/console/logout", data={"form_token": form}, headers=mine)
        assert (await world.http.get("/console", headers=mine)).status_code == 303
    async with open_app(tmp_path, api_keys=KEYS) as world:
        assert (await world.http.get("/console", headers=mine)).status_code == 303, "a restart"
        assert (await world.http.get("/console", headers=other)).status_code == 200


async def test_an_ended_login_stays_so_after_a_restart_however_often_another_logs_out(
    tmp_path: Path,
) -> None:
    async with open_app(tmp_path, api_keys=KEYS) as world:
        auth, audit = world.parts.auth, world.service.store.audit
        token = await auth.issue_token(ANN)
        await auth.end_token(token)
        for number in range(10_001):
            audit.record("bob", LOGOUT, {"token": str(number)})
    async with open_app(tmp_path, api_keys=KEYS) as world:
        with pytest.raises(ApiError):
            await world.parts.auth.user_of(token)
        assert len(world.parts.auth._ended) == 1 + MAX_ENDED_OF_USER


async def test_guesses_of_a_weights_access_token_are_put_off_like_logins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailedLogins, "MAX_A_MINUTE", 3)
    async with open_app(tmp_path, api_keys=KEYS) as world:
        model = await world.model(key=ANN)
        saved = await world.ok("save_weights", save_body(model, 1, "mine"), key=ANN)
        path = (await world.result(saved, key=ANN))["path"]

        async def copied(token: str) -> httpx.Response:
            body = {"source_path": path, "destination_project_id": "p"}
            return await world.post(
                "copy_weights", {**body, "weights_access_token": token}, key=BOB
            )

        answers = [await copied(f"tml-guess-{number}") for number in range(5)]
        assert [answer.status_code for answer in answers] == [401, 401, 401, 429, 429]
        assert answers[-1].headers["retry-after"] == "60"
        assert (await copied(await _token(world, ANN))).status_code == 200, "a valid one is served"
        session = await world.session(key=BOB)
        body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        body["weights_access_token"] = "tml-guess"
        told = await world.post("load_weights", body, key=BOB)
        if told.status_code == 200:
            told_text = str(await world.result(told.json(), key=BOB))
        else:
            told_text = told.text
        assert "Too many attempts" in told_text
        events = world.service.store.audit.page(9, 0, prefix="login_refused")
        assert [event.details["address"] for event in events] == ["user bob"]


# ------------------------------------------------------------------------------------ public_url


async def _archive_link(world: AppWorld, host: str) -> httpx.Response:
    model = await world.model(key=ANN)
    saved = await world.ok("save_weights_for_sampler", save_body(model, 1, "mine"), key=ANN)
    await world.result(saved, key=ANN)
    headers = {"x-api-key": ANN, "host": host}
    path = f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/mine/archive"
    return await world.http.get(path, headers=headers, follow_redirects=False)


async def test_links_are_made_with_the_public_url_and_other_names_are_refused(
    tmp_path: Path,
) -> None:
    url = "https://tinkex.example.org"
    async with open_app(tmp_path, api_keys=KEYS, public_url=f"{url}/") as world:
        answer = await _archive_link(world, "tinkex.example.org")
        assert answer.headers["location"].startswith(f"{url}/api/v1/signed/"), answer.text
        headers = {"x-api-key": ANN, "host": "evil.example"}
        for path in ("/api/v1/get_server_capabilities", "/console/login", "/v1/models"):
            answer = await world.http.get(path, headers=headers)
            assert (answer.status_code, url in answer.text) == (403, True), path
        for path in ("/api/v1/healthz", "/readyz", "/metrics"):
            answer = await world.http.get(path, headers=headers)
            assert answer.status_code == 200, "probes come by address"
        headers["host"] = "tinkex.example.org:443"
        assert (await world.http.get("/v1/models", headers=headers)).status_code == 200
        login = await _log_in(world, origin=url, host="localhost")
        assert "set-cookie" in login.headers, "a proxy that rewrites the Host"


async def test_without_a_public_url_links_have_the_name_that_was_asked(world: AppWorld) -> None:
    answer = await _archive_link(world, "ann.example:8765")
    assert answer.headers["location"].startswith("http://ann.example:8765/api/v1/signed/")


@pytest.mark.parametrize("url", ["tinkex.example.org", "ftp://x", "https://x/y", "http://u@x:1"])
def test_a_public_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="public_url must be like"):
        ServerConfig(public_url=url)


# ------------------------------------------------------------------------------------ streams


async def _streamed(world: AppWorld, request: dict[str, Any], ended: list[float]) -> str:
    """A request over a real connection's worth of ASGI: what it was sent until its end."""
    async with world.http.stream(**request) as answer:
        assert answer.status_code == 200
        text = "".join([piece async for piece in answer.aiter_text()])
    ended.append(1.0)
    return text


@pytest.mark.parametrize("end", ["revoke", "disable", "logout"])
async def test_a_stream_of_the_console_ends_with_its_key_its_user_or_its_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("tinkex.server.guard.auth.CACHE_S", 0.2)
    async with open_app(tmp_path) as world:
        accounts = world.service.store.accounts
        for user_id, key, role in (("eve", "tml-eve", "user"), ("root", "tml-root", "admin")):
            accounts.ensure_user(user_id)
            accounts.add_key(key, user_id, role=role)
        model = await world.model(key="tml-eve")
        login = await world.http.post("/console/login", data={"key": "tml-eve"})
        cookie = _cookie_of(login)
        world.http.cookies.clear()
        ended: list[float] = []
        live = {"method": "GET", "url": f"/console/api/runs/{model}/live", "headers": cookie}
        task = asyncio.create_task(_streamed(world, live, ended))
        await asyncio.sleep(0.5)
        assert not ended
        if end == "logout":
            await world.parts.auth.end_token(cookie["cookie"].partition("=")[2])
        elif end == "disable":
            path = "/tinkex/v1/admin/users/eve/disable"
            await world.http.post(path, json={}, headers={"x-api-key": "tml-root"})
        else:
            (key,) = accounts.keys(["eve"])
            accounts.revoke_key(key.key_id)  # as `tinkex keys revoke` does, in another process
        await soon(lambda: ended)
        assert "data:" in await task


async def test_a_stream_of_tokens_ends_with_its_key(tmp_path: Path) -> None:
    async with open_app(tmp_path, engine="toy:token_latency_s=0.05") as world:
        accounts = world.service.store.accounts
        accounts.ensure_user("eve")
        accounts.add_key("tml-eve", "eve")
        session = await world.session(key="tml-eve")
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
        sampler = await world.ok("create_sampling_session", body, key="tml-eve")
        asked = {
            "sampling_session_id": sampler["sampling_session_id"],
            "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 20_000, "stop": [0]},
        }
        request = {
            "method": "POST",
            "url": "/api/v1/sample_stream",
            "json": asked,
            "headers": {"x-api-key": "tml-eve"},
        }
        ended: list[float] = []
        task = asyncio.create_task(_streamed(world, request, ended))
        await soon(lambda: world.service.samples._runs)
        await world.service.samples.end_revoked()
        await asyncio.sleep(0.2)
        assert not ended, "a valid key goes on"
        (key,) = accounts.keys(["eve"])
        accounts.revoke_key(key.key_id)
        await soon(lambda: ended)
        assert "The key of this request was revoked" in await task


async def test_logging_out_again_and_again_lets_in_nobody_elses_ended_token(
    world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.guard.auth.MAX_ENDED_OF_USER", 3)
    auth = world.parts.auth

    async def ended(key: str) -> str:
        answer = await world.post("auth/token", {}, key=key)
        token = str(answer.json()["jwt"])
        await auth.end_token(token)
        return token

    theirs = await ended(ANN)
    mine = [await ended(BOB) for _ in range(6)]
    assert len(auth._ended) == 4
    for token in (theirs, *mine[-3:]):
        answer = await world.http.get("/api/v1/sessions", headers={"X-API-Key": token})
        assert answer.status_code == 401

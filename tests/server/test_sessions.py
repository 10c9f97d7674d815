"""Sessions: signs of life, silence, and the end."""

from __future__ import annotations

from pathlib import Path

from app_world import AppWorld, open_app
from patience import soon

from tinkex.server.process.presence import Presence
from tinkex.server.runs.live_sessions import LiveSessions
from tinkex.store import Store
from tinkex.wire.local_servers import is_alive


def test_each_silence_is_reported_once(tmp_path: Path) -> None:
    now = [0.0]
    store = Store.in_folder(tmp_path)
    sessions = LiveSessions(store, clock=lambda: now[0])
    for name in ("quiet", "busy"):
        sessions.touch(name)
    now[0] = 200
    sessions.touch("busy")
    now[0] = 301
    assert sessions.fell_silent(300) == ["quiet"]
    assert sessions.fell_silent(300) == []
    sessions.touch("quiet")
    now[0] = 602
    assert sorted(sessions.fell_silent(300)) == ["busy", "quiet"]
    store.close()


async def test_a_finished_session_stops_its_heartbeat(app_world: AppWorld) -> None:
    session = await app_world.session()
    beat = {"session_id": session}
    assert (await app_world.post("session_heartbeat", beat)).status_code == 200
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await app_world.post(f"sessions/{session}/finish", finish)).status_code == 204
    assert (await app_world.post("session_heartbeat", beat)).status_code == 410
    assert (await app_world.post("session_heartbeat", {"session_id": "x"})).status_code == 404


async def test_silence_parks_the_models_without_being_asked(
    tmp_path: Path,
    monkeypatch,  # type: ignore[no-untyped-def]
) -> None:
    monkeypatch.setattr("tinkex.server.service.service.TICK_S", 0.05)
    async with open_app(tmp_path, park_after_s=0.3) as world:
        model = await world.model()
        await world.result((await world.train(model, 1, [1, 2, 3])).json())
        await soon(lambda: world.service.num_lanes == 0)
        assert len(list((tmp_path / "state").glob("*/*"))) == 1, "its state is saved"
        done = (await world.step(model, 2)).json()
        assert (await world.result(done))["metrics"]["step:max"] == 1.0


async def test_two_users_sessions_are_strangers(tmp_path: Path) -> None:
    async with open_app(tmp_path, api_keys=("tml-ada=ada", "tml-bob=bob")) as world:
        session = await world.session(key="tml-ada")
        beat = {"session_id": session}
        assert (await world.post("session_heartbeat", beat, key="tml-ada")).status_code == 200
        assert (await world.post("session_heartbeat", beat, key="tml-bob")).status_code == 404
        body = {"session_id": session, "base_model": "toy"}
        assert (await world.post("create_model", body, key="tml-bob")).status_code == 404
        opened = body | {"sampling_session_seq_id": 0}
        assert (
            await world.post("create_sampling_session", opened, key="tml-bob")
        ).status_code == 404


def test_presence_counts_pids_and_requests() -> None:
    now = [0.0]
    presence = Presence(until_idle_s=10, parent_pid=1, clock=lambda: now[0])
    now[0] = 100
    assert not presence.is_deserted(), "pid 1 lives"
    presence.detach(1)
    presence.request_started()
    now[0] = 200
    assert not presence.is_deserted(), "a request is open"
    presence.request_ended()
    now[0] = 205
    assert not presence.is_deserted()
    now[0] = 211
    assert presence.is_deserted()
    presence.attach(2**22 + 12345)
    now[0] = 300
    assert presence.is_deserted(), "no such process"
    assert is_alive(1)

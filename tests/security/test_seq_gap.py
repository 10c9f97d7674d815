"""Numbers of requests: no number, however large, costs more than the request that carries it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from app_world import AppWorld, open_app
from patience import soon
from server_process import ServerProcess
from wire_client import Failed, WireClient, loss_of

from tinkex.server.work.futures import Outcome, Promise
from tinkex.store import NewRow

TOKENS = [1, 2, 3, 4]
FAR = 2**40
LAST = 2**63 - 1


def journaled(model: str, seq_id: int, **fields: str) -> NewRow:
    body = b'{"adam_params":{},"optimizer_params":null}'
    return NewRow(
        model_id=model,
        seq_id=seq_id,
        kind="optim_step",
        request_id=f"{model}:{seq_id}",
        user_id="local",
        body=body,
        **fields,
    )


async def test_a_number_far_ahead_is_refused_and_stays_free(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        model = await world.model()
        for number in (FAR, LAST):
            refused = await world.step(model, number)
            assert refused.status_code == 400
            assert "too far ahead: the highest number" in refused.json()["detail"]
        done = (await world.train(model, 1, TOKENS)).json()
        assert loss_of(await world.result(done)) > 0


async def test_a_gap_in_an_old_journal_ends_at_once(tmp_path: Path) -> None:
    """A server of before this bound accepted such numbers; they wait in its journal."""
    async with open_app(tmp_path) as world:
        model = await world.model()
        store = world.parts.store
        store.journal.append(journaled(model, FAR)).result()
    for gap_limit_s in (0.2, 0.2):  # again after a restart, which finds its end in the journal
        async with open_app(tmp_path, gap_limit_s=gap_limit_s) as world:
            started = time.monotonic()
            failed = await world.result({"request_id": f"{model}:{FAR}"})
            assert "seq_id 1, 2, 3, 4, 5, ... " in failed["error"]
            assert time.monotonic() - started < 30
    async with open_app(tmp_path) as world:  # the lane restores its state across the hole
        done = (await world.step(model, FAR + 1)).json()
        assert (await world.result(done))["metrics"]["step:max"] == 1.0
        lane = world.service.find_lane(model)
        assert lane.queue.numbers.applied == FAR + 1


async def test_after_the_last_number_a_request_without_one_is_refused(tmp_path: Path) -> None:
    async with open_app(tmp_path) as world:
        model = await world.model()
        store = world.parts.store
        store.journal.append(journaled(model, LAST, refused="an old one")).result()
    async with open_app(tmp_path) as world:
        step = {"model_id": model, "seq_id": None, "adam_params": {}}
        refused = await world.post("optim_step", step)
        assert refused.status_code == 400
        assert "last number" in refused.json()["detail"]


async def test_concurrent_identical_creations_give_one_promise(app_world: AppWorld) -> None:
    body = {"session_id": await app_world.session(), "model_seq_id": 0, "base_model": "toy"}
    made = await asyncio.gather(*(app_world.post("create_model", body) for _ in range(8)))
    assert [response.status_code for response in made] == [200] * 8
    assert len({response.json()["request_id"] for response in made}) == 1
    assert "error" not in await app_world.result(made[0].json())


async def test_a_failure_is_told_only_when_the_journal_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash in between runs what its owner was told was not run."""
    async with open_app(tmp_path, gap_limit_s=0.2, hold_s=0.5) as world:
        model = await world.model()
        states: list[str] = []

        def settled(self: Promise, _: Outcome) -> bool:
            states.append(world.parts.store.journal.get(self.request_id).state)
            return True

        monkeypatch.setattr(Promise, "settle", settled)
        await world.train(model, 2, TOKENS)
        await soon(lambda: states)
        assert states == ["failed"]


def test_what_was_not_run_stays_so_after_a_kill(tmp_path: Path) -> None:
    flags = ("--engine", "toy", "--deterministic")
    settings = tmp_path / "settings.toml"
    settings.write_text("gap_limit_s = 0.5\n")
    with ServerProcess(tmp_path, *flags, "--config", str(settings)) as server:
        client = WireClient(server.base_url)
        model = client.model(client.session())
        waiting = client.train(model, 2, TOKENS)
        with pytest.raises(Failed, match="were not run"):
            client.result(waiting)
        server.kill()
        server.start()
        late = client.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert late.status_code == 400, "number 1 would let number 2 run"
        with pytest.raises(Failed, match="were not run"):
            client.result(waiting)
        client.close()

"""`tinkex admin adopt`: runs of another data folder come whole, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from app_world import open_app
from wire_client import save_body

from tinkex.errors import ConfigError
from tinkex.server.files import adoption
from tinkex.server.files.adoption import adopt
from tinkex.store import Store
from tinkex.store.claim import LOCK_FILE

OURS = "/tinkex/v1"
KEY = {"x-api-key": "tml-test"}


@pytest.fixture
async def source(tmp_path: Path) -> tuple[Path, list[str]]:
    """A data folder with the run `orders` of two segments, and the run `other`; their models."""
    folder = tmp_path / "source"
    async with open_app(folder) as world:
        session = await world.session()
        first = await world.model(session)
        await world.result((await world.train(first, 1, [1, 2, 3])).json())
        await world.result((await world.step(first, 2)).json())
        await world.result(await world.ok("save_weights", save_body(first, 3, "a")))
        body = {"session_id": session, "model_seq_id": 1, "path": f"tinker://{first}/weights/a"}
        made = await world.result(await world.ok("load_weights", body | {"optimizer": True}))
        second = made["model_id"]
        told = {"continues": {"run_id": first, "step": 1}, "name": "orders", "note": "try it"}
        await world.http.put(f"{OURS}/runs/{second}", headers=KEY, json=told)
        saving = save_body(second, 1, "b")
        await world.result(await world.ok("save_weights_for_sampler", saving))
        path = {"name": "best", "path": f"tinker://{second}/sampler_weights/b"}
        await world.ok("checkpoint_names", path)
        other = await world.model(session, 2)
        await world.http.put(f"{OURS}/runs/{other}", headers=KEY, json={"name": "other"})
        await world.result(await world.ok("save_weights", save_body(other, 1, "c")))
    return folder, [first, second, other]


def digest_of(folder: Path) -> dict[str, str]:
    """Every file but the lock, which says who looked last, and what SQLite's readers share."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in (LOCK_FILE, "tinkex.db-shm", "tinkex.db-wal")
    }


def adopted_into(target: Path, source: Path, **how: Any) -> adoption.Adopted:
    store = Store.in_folder(target)
    try:
        store.claim(data_dir=target)
        return adopt(store, target, source, **how)
    finally:
        store.close()


async def test_runs_come_with_names_curves_and_checkpoints_that_load(
    tmp_path: Path, source: tuple[Path, list[str]]
) -> None:
    folder, (first, second, other) = source
    before, target = digest_of(folder), tmp_path / "target"
    adopted = adopted_into(target, folder)
    assert [run.name for run in adopted.runs] == ["orders", "other"]
    assert digest_of(folder) == before, "the original is untouched"
    async with open_app(target) as world:
        listed = (await world.call("GET", "/training_runs", 200))["training_runs"]
        assert [run["name"] for run in listed] == ["other", "orders"]
        run = await world.call("GET", f"/training_runs/{second}", 200)
        assert (run["note"], run["num_steps"], run["state"]) == ("try it", 1, "finished")
        assert [one["run_id"] for one in run["segments"]] == [first, second]
        named = await world.call("GET", "/checkpoint_names", 200)
        assert [one["name"] for one in named["names"]] == ["best"]
        for path, with_optimizer in ((f"tinker://{first}/weights/a", True),):
            body = {"session_id": await world.session(), "model_seq_id": 0, "path": path}
            made = await world.ok("load_weights", body | {"optimizer": with_optimizer})
            assert (await world.result(made))["model_id"]
        sample = await world.post("weights_info", {"tinker_path": f"tinker://{other}/weights/c"})
        assert sample.status_code == 200
    again = adopted_into(target, folder)
    assert (again.runs, len(again.there)) == ([], 2), "a repeat changes nothing"


def test_one_run_is_chosen_by_name_and_given_to_a_user_with_a_key(
    tmp_path: Path, source: tuple[Path, list[str]]
) -> None:
    folder, (_, second, _) = source
    target = tmp_path / "target"
    store = Store.in_folder(target)
    store.accounts.ensure_user("ann")
    store.accounts.add_key("tml-ann", "ann")
    store.close()
    with pytest.raises(ConfigError, match="--owner USER"):
        adopted_into(target, folder)
    with pytest.raises(ConfigError, match="has no run 'nobody'"):
        adopted_into(target, folder, run="nobody", owner="ann")
    adopted = adopted_into(target, folder, run="orders", owner="ann")
    assert [run.model_id for run in adopted.runs] == [second]
    store = Store.in_folder(target)
    mine, total = store.models.page("ann", 10, 0)
    assert ([model.name for model in mine], total) == (["orders"], 1)
    assert store.names.get("ann", "best") is not None
    assert store.checkpoints.page("ann", 10, 0)[1] == 2
    store.close()


def test_a_damaged_run_is_refused_whole_and_the_others_come(
    tmp_path: Path, source: tuple[Path, list[str]]
) -> None:
    folder, (first, second, _) = source
    [weights] = (folder / "checkpoints" / first.replace(":", "-")).rglob("*.npz")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    target = tmp_path / "target"
    adopted = adopted_into(target, folder)
    assert [run.name for run in adopted.runs] == ["other"]
    assert "damaged" in adopted.refused[second]
    assert len(list((target / "checkpoints").glob("*/*/*"))) == 1


@pytest.mark.parametrize("moment", [1, 2, 3])
async def test_a_crash_leaves_no_half_run_and_loses_none(
    tmp_path: Path,
    source: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    moment: int,
) -> None:
    """Killed when the nth folder is there; nothing is tidied up, as after a power cut."""
    folder, target = source[0], tmp_path / "target"
    left, write_whole = [moment], adoption.write_whole

    def dying(*args: Any, **kwargs: Any) -> int:
        written = write_whole(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return written

    with monkeypatch.context() as patch:
        patch.setattr(adoption, "write_whole", dying)
        patch.setattr(adoption.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            adopted_into(target, folder)
    async with open_app(target) as world:
        listed = (await world.call("GET", "/training_runs", 200))["training_runs"]
        assert [run["name"] for run in listed] == (["orders"] if moment == 3 else [])
    adopted = adopted_into(target, folder)
    assert len(adopted.runs) + len(adopted.there) == 2
    async with open_app(target) as world:
        listed = (await world.call("GET", "/training_runs", 200))["training_runs"]
        assert [run["name"] for run in listed] == ["other", "orders"]


async def test_a_folder_that_a_server_uses_is_not_read(
    tmp_path: Path, source: tuple[Path, list[str]]
) -> None:
    async with open_app(source[0]):
        with pytest.raises(ConfigError, match="A server uses"):
            adopted_into(tmp_path / "target", source[0])


def test_a_link_in_a_checkpoint_leads_nowhere(
    tmp_path: Path, source: tuple[Path, list[str]]
) -> None:
    folder, (first, second, _) = source
    [weights] = (folder / "checkpoints" / first.replace(":", "-")).rglob("*.npz")
    secret = tmp_path / "secret"
    secret.write_bytes(weights.read_bytes())
    weights.unlink()
    weights.symlink_to(secret)
    adopted = adopted_into(tmp_path / "target", folder)
    assert "neither a file nor a folder" in adopted.refused[second]

"""What Tinkex keeps is shown by run, and what nobody needs can be removed."""

from __future__ import annotations

import pytest
from datums import datum

MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"


@pytest.fixture
def home(tmp_path, monkeypatch, start_server):
    """The data of a server that has ended: a run with a checkpoint and unnamed weights."""
    from tinkex import AdamParams, ServiceClient

    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    folder = tmp_path / "server"
    folder.mkdir()
    with (
        start_server(folder, "--engine", "toy") as base_url,
        ServiceClient(base_url=base_url, display_name="pirate") as service,
    ):
        training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=0)
        training.forward_backward([datum([1, 5, 9, 2])], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result()
        training.save_state("one").result()
        training.save_weights_and_get_sampling_client()
        (folder / "quarantine" / "20260101-000000").mkdir(parents=True)
        (folder / "quarantine" / "20260101-000000" / "stray").write_bytes(b"x" * 5000)
    return folder, training.model_id


def _only_run(cli) -> dict:
    (folder,) = cli("disk", "--json").json["folders"]
    (run,) = folder["runs"]
    return run


def test_disk_shows_each_run_with_what_it_keeps(cli, home):
    folder, run_id = home
    run = _only_run(cli)
    assert (run["run_id"], run["name"], run["is_open"]) == (run_id, "pirate", False)
    assert all(run["sizes"][kind] > 0 for kind in ("checkpoints", "samplers", "requests"))
    table = cli("disk")
    assert "pirate" in table.out
    assert run_id in table.out, "what `gc --run` takes"
    assert "gc --older-than 0m` frees" not in table.err, "less than a megabyte"
    assert "just now" in table.out
    assert str(folder) in table.out


def test_gc_leaves_checkpoints_and_takes_the_rest(cli, home):
    folder, _ = home
    assert cli("gc", "--json").json["removed"][0]["runs"] == 0, "used an hour ago: not yet"
    assert not (folder / "quarantine").exists()
    planned = cli("gc", "--older-than", "0s", "--dry-run", "--json").json["removed"][0]
    assert planned["runs"] == 1
    assert _only_run(cli)["sizes"]["samplers"] > 0, "a dry run removes nothing"
    done = cli("gc", "--older-than", "0s", "--json").json["removed"][0]
    assert done["runs"] == 1
    sizes = _only_run(cli)["sizes"]
    assert sizes["checkpoints"] > 0
    assert sizes["state"] == sizes["samplers"] == sizes["requests"] == 0
    assert not list((folder / "ephemeral").glob("*"))


def test_gc_of_a_run_takes_its_checkpoints_too(cli, home):
    folder, run_id = home
    assert cli("gc", "--run", "no-such-run").code == 1
    assert cli("gc", "--run", "pirate", "--yes").code == 0, "by the name that `disk` shows"
    assert cli("disk", "--json").json["folders"][0]["runs"] == []
    assert not list((folder / "checkpoints").glob("*/*/*"))


def test_gc_leaves_the_folder_of_a_running_server_alone(cli, tmp_path, start_server, monkeypatch):
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    folders = tmp_path / "local", tmp_path / "server"
    for folder in folders:
        folder.mkdir()
    with start_server(folders[1], "--engine", "toy"):
        refused = cli("gc")
        assert refused.code == 1
        words = f"A running server uses {folders[1]}; nothing is removed there. Stop it"
        assert words in refused.err
        with start_server(folders[0], "--engine", "toy"):
            pass
        ran = cli("gc", "--json")
    assert ran.code == 0, ran.err
    assert [entry["folder"] for entry in ran.json["removed"]] == [str(folders[0])]
    assert words in ran.err
    assert cli("gc", "--older-than", "soon").code == 2


def test_gc_waits_for_the_private_server_to_end(cli, tmp_path, start_server, monkeypatch):
    """It lives on for seconds after the last command, and nobody knows how to stop it."""
    from tinkex.store import Store

    monkeypatch.setenv("TINKEX_HOME", str(tmp_path))
    folder = tmp_path / "local"
    folder.mkdir()
    with start_server(folder, "--engine", "toy"):
        pass
    server = Store.in_folder(folder)
    server.claim(1.0, data_dir=folder)
    notes = []

    def note(state, text):
        notes.append(text)
        server.close()

    monkeypatch.setattr("tinkex.cli.state.State.note", note)
    ran = cli("gc")
    assert ran.code == 0, ran.err
    assert "Waiting for the private server to end" in notes[0]

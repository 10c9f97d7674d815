"""run, checkpoint, session, model, billing, auth: table, JSON and a failure of each (R30)."""

from __future__ import annotations

import datetime as dt
import io
import json
import subprocess
import sys

import pytest


def test_model_list(cli):
    table = cli("model", "list", "SMOL")
    assert table.code == 0
    assert "Max Context" in table.out
    assert "tinkex/SmolLM2-135M-Instruct-Q4" in table.out
    models = cli("model", "list", "--json").json["models"]
    assert models[0]["model_name"] == "tinkex/SmolLM2-135M-Instruct-Q4"
    assert set(models[0]) >= {"max_context_length", "trainable", "sampleable"}


def test_model_list_without_a_match_names_what_is_there(cli):
    ran = cli("model", "list", "gpt-99")
    assert (ran.code, ran.out) == (1, "")
    assert "No model matches 'gpt-99'; this server has: tinkex/Smol" in ran.err


def test_run_list(cli, saved):
    table = cli("run", "list", "--limit", "0")
    assert f"{saved.run_id}" in table.out
    assert "finished" in table.out
    runs = cli("run", "list", "--json", "--limit", "2").json["runs"]
    assert 1 <= len(runs) <= 2
    assert runs[0]["training_run_id"] == saved.run_id


def test_run_list_shows_the_columns_asked_for(cli, saved):
    out = cli("run", "list", "-c", "id,owner,checkpoint", "--limit", "1").out
    assert out.split("\n")[2].split() == ["Run", "ID", "Owner", "Last", "Checkpoint"]
    assert "weights/one" in out
    bad = cli("run", "list", "-c", "id,colour")
    assert bad.code == 2
    assert "no column 'colour'" in bad.err


def test_run_list_skips_and_counts(cli, saved):
    everything = cli("run", "list", "--json", "--limit", "0").json["runs"]
    rest = cli("run", "list", "--json", "--limit", "0", "--offset", "1").json["runs"]
    assert rest == everything[1:]


def test_run_info(cli, saved):
    table = cli("run", "info", saved.run_id)
    assert saved.state_path in table.out
    assert saved.sampler_path in table.out
    assert cli("run", "info", saved.run_id, "--json").json["lora_rank"] == 4
    by_path = cli("run", "info", saved.state_path, "--json").json
    assert by_path["training_run_id"] == saved.run_id


def test_run_info_of_an_unknown_run_fails(cli):
    ran = cli("run", "info", "nobody:train:0")
    assert (ran.code, ran.out) == (1, "")
    assert "nobody:train:0" in ran.err


def test_checkpoint_list(cli, saved):
    table = cli("checkpoint", "list", "--run-id", saved.run_id)
    assert "weights/one" in table.out
    assert saved.sampler_path in table.out
    listed = cli("checkpoint", "list", "--run-id", saved.run_id, "--json").json
    assert listed["run_id"] == saved.run_id
    assert {c["tinker_path"] for c in listed["checkpoints"]} == {
        saved.state_path,
        saved.sampler_path,
    }
    mine = cli("checkpoint", "list", "--json", "--limit", "1").json
    assert len(mine["checkpoints"]) == 1
    assert "run_id" not in mine


def test_checkpoint_list_of_an_unknown_run_fails(cli):
    ran = cli("checkpoint", "list", "--run-id", "nobody:train:0")
    assert ran.code == 1
    assert ran.err.startswith("Error: ")


def test_checkpoint_info(cli, saved):
    table = cli("checkpoint", "info", saved.state_path)
    assert "Rank 4" in table.out
    assert "Metadata: note" in table.out
    shown = cli("checkpoint", "info", saved.state_path, "--json").json
    assert (shown["is_lora"], shown["lora_rank"]) == (True, 4)
    assert shown["tinker_path"] == saved.state_path


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("weights/one", 1, "neither a checkpoint, which looks like tinker://RUN/weights/NAME"),
        ("tinker://nobody:train:0/weights/x", 1, "nobody:train:0"),
    ],
)
def test_checkpoint_info_of_something_else_fails(cli, path, code, words):
    ran = cli("checkpoint", "info", path)
    assert ran.code == code
    assert words in ran.err


def test_publish_and_unpublish_change_the_listing(cli, saved):
    def public():
        return cli("checkpoint", "info", saved.state_path, "--json").json["public"]

    assert cli("checkpoint", "publish", saved.state_path).out == ""
    assert public() is True
    told = cli("checkpoint", "unpublish", saved.state_path, "--json").json
    assert told == {"path": saved.state_path, "public": False}
    assert public() is False
    assert cli("checkpoint", "publish", "tinker://nobody:train:0/weights/x").code == 1
    assert cli("checkpoint", "unpublish", "tinker://nobody:train:0/weights/x").code == 1


def test_set_ttl_sets_and_removes(cli, saved):
    def expires():
        return cli("checkpoint", "info", saved.state_path, "--json").json["expires_at"]

    assert cli("checkpoint", "set-ttl", saved.state_path, "--ttl", "7200").code == 0
    assert expires() is not None
    told = cli("checkpoint", "set-ttl", saved.state_path, "--remove", "--json").json
    assert told == {"path": saved.state_path, "ttl_seconds": None}
    assert expires() is None


@pytest.mark.parametrize(
    ("options", "code"), [((), 2), (("--ttl", "7200", "--remove"), 2), (("--ttl", "5"), 1)]
)
def test_set_ttl_refuses_none_both_and_too_little(cli, saved, options, code):
    assert cli("checkpoint", "set-ttl", saved.state_path, *options).code == code


def test_delete_by_path(cli, saved):
    ran = cli("checkpoint", "delete", saved.sampler_path, "-y")
    assert ran.out == "Deleted 1 checkpoint(s)\n"
    left = cli("checkpoint", "list", "--run-id", saved.run_id, "--json").json["checkpoints"]
    assert [c["tinker_path"] for c in left] == [saved.state_path]


def test_delete_by_run_with_filters(cli, saved):
    tomorrow = (dt.datetime.now(dt.UTC) + dt.timedelta(days=1)).date().isoformat()
    ran = cli("checkpoint", "delete", "--run-id", saved.run_id, "--after", tomorrow, "-y", "--json")
    assert ran.json == {"deleted_count": 0, "failed": []}
    options = ("--type", "sampler", "--before", tomorrow, "-y", "--json")
    ran = cli("checkpoint", "delete", "--run-id", saved.run_id, *options)
    assert ran.out == '{"deleted_count": 1, "failed": []}\n'


def test_delete_reports_what_it_could_not_delete(cli, saved):
    missing = "tinker://nobody:train:0/weights/x"
    ran = cli("checkpoint", "delete", missing, saved.state_path, "-y", "--json")
    assert ran.code == 1, "a script must notice"
    assert ran.json["deleted_count"] == 1
    assert ran.json["failed"][0]["tinker_path"] == missing
    ran = cli("checkpoint", "delete", missing, "-y")
    assert (ran.code, ran.out) == (1, "Deleted 0 checkpoint(s)\n")
    assert "List yours with `tinkex checkpoint list`" in ran.err
    assert "/api/v1/" not in ran.err


def test_what_changes_a_checkpoint_says_what_it_did(cli, saved):
    path = saved.state_path
    assert "every user of the server may read" in cli("checkpoint", "publish", path).err
    assert "only you may read" in cli("checkpoint", "unpublish", path).err
    assert "expires in 2 hours" in cli("checkpoint", "set-ttl", path, "--ttl", "7200").err
    assert "stays until it is deleted" in cli("checkpoint", "set-ttl", path, "--remove").err


def test_a_checkpoint_has_a_name_until_it_is_taken_back(cli, saved):
    path = saved.sampler_path
    assert f"pirate is {path}" in cli("checkpoint", "name", path, "pirate").err
    assert {"name": "pirate", "path": path} in cli("checkpoint", "names", "--json").json["names"]
    assert cli("checkpoint", "unname", "pirate", "--json").json == {"name": "pirate"}
    assert cli("checkpoint", "unname", "pirate").code == 1


def test_a_checkpoint_is_deleted_by_its_name_and_a_run_by_its_own_option(cli, saved):
    assert cli("checkpoint", "name", saved.sampler_path, "pirate").code == 0
    assert cli("checkpoint", "delete", "pirate", "-y").out == "Deleted 1 checkpoint(s)\n"
    refused = cli("checkpoint", "delete", saved.run_id, "-y")
    assert refused.code == 1
    assert f"--run-id {saved.run_id}" in refused.err
    left = cli("checkpoint", "list", "--run-id", saved.run_id, "--json").json["checkpoints"]
    assert [c["tinker_path"] for c in left] == [saved.state_path]


def test_a_run_of_a_misspelt_name_is_told_with_near_names(cli, saved):
    assert cli("run", "rename", saved.run_id, "near-one").code == 0
    for command in (("info",), ("stop",), ("trace",)):
        missed = cli("run", *command, "naer-one")
        assert (missed.code, "Did you mean 'near-one'?" in missed.err) == (1, True), missed.err


def test_a_run_is_shown_under_its_own_name(cli, saved):
    """Rich reads `:train:` in a title as the name of a picture."""
    assert f"Training run {saved.run_id}" in cli("run", "info", saved.run_id).out


@pytest.mark.parametrize(
    "args",
    [(), ("--run-id", "r", "tinker://r/weights/x"), ("tinker://r/weights/x", "--type", "training")],
)
def test_delete_needs_paths_or_a_run(cli, args):
    assert cli("checkpoint", "delete", *args).code == 2


def test_delete_asks_first_and_no_means_130(cli, saved, monkeypatch):
    monkeypatch.setattr("click.confirm", _refuse)
    ran = cli("checkpoint", "delete", saved.state_path)
    assert ran.code == 130
    assert cli("checkpoint", "info", saved.state_path).code == 0


def _refuse(*args, **kwargs):
    import click

    raise click.Abort


def test_session_list_and_info(cli, saved):
    assert saved.session_id in cli("session", "list", "--limit", "0").out
    assert saved.session_id in cli("session", "list", "--limit", "0", "--json").json["sessions"]
    table = cli("session", "info", saved.session_id)
    assert saved.run_id in table.out
    assert "by-a-test" in table.out
    shown = cli("session", "info", saved.session_id, "--json").json
    assert shown["training_run_ids"] == [saved.run_id]
    assert cli("session", "info", "no-such-session").code == 1


def test_session_export_trace(cli, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = cli("session", "export-trace", saved.session_id, "--json").json
    assert shown["destination"] == f"{saved.session_id}.pftrace"
    assert (tmp_path / shown["destination"]).stat().st_size == shown["file_size_bytes"]
    target = tmp_path / "there.pftrace"
    table = cli("session", "export-trace", saved.session_id, "-o", target)
    assert "there.pftrace" in table.out
    assert cli("session", "export-trace", saved.session_id, "--url-only").out.startswith("http")
    assert cli("session", "export-trace", "no-such-session").code == 1


def test_run_trace_goes_to_a_pipe_or_to_a_file(cli, saved, tmp_path, monkeypatch):
    from perfetto_slices import perfetto_slices

    monkeypatch.chdir(tmp_path)
    table = cli("run", "trace", saved.run_id, "-o", "there.pftrace")
    assert "there.pftrace" in table.out
    slices = perfetto_slices((tmp_path / "there.pftrace").read_bytes())
    assert "optim_step" in [one.name for one in slices[saved.run_id, "requests"]]
    assert len(slices[saved.run_id, "passes"]) == 1
    shown = cli("run", "trace", saved.run_id, "--json").json
    assert (tmp_path / shown["destination"]).stat().st_size == shown["file_size_bytes"]
    assert cli("run", "trace", "no-such-run").code == 1
    command = [sys.executable, "-m", "tinkex.cli", "run", "trace", saved.run_id]
    piped = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=500)
    assert perfetto_slices(piped.stdout).keys() == slices.keys()


def hours():
    now = dt.datetime.now(dt.UTC).replace(minute=0, second=0, microsecond=0)
    return [
        (now + dt.timedelta(hours=delta)).isoformat().replace("+00:00", "Z") for delta in (-1, 1)
    ]


def test_billing_usage(cli, saved, tmp_path):
    start, end = hours()
    table = cli("billing", "usage", start, end)
    assert "event_info.type" in table.out
    assert "training" in table.out
    shown = cli("billing", "usage", start, end, "--json").json
    assert set(shown) == {"data", "sessions", "cost_data_through"}
    assert shown["data"][0]["bucket_start"].endswith("Z")
    csv = cli("billing", "usage", start, end, "--csv", "-").out
    assert csv.startswith("bucket_start,")
    sessions = tmp_path / "sessions.csv"
    assert cli("billing", "usage", start, end, "--sessions-csv", sessions).code == 0
    assert sessions.read_text().startswith("session_id")


def test_billing_usage_of_a_wrong_range_fails(cli):
    ran = cli("billing", "usage", "yesterday", "today")
    assert ran.code == 1
    assert ran.err.startswith("Error: ")


def test_billing_checkpoint_storage(cli, saved):
    assert "checkpoint_count" in cli("billing", "checkpoint-storage").out
    shown = cli("billing", "checkpoint-storage", "--json").json
    assert shown["data"][0]["checkpoint_count"] >= 1
    assert cli("billing", "checkpoint-storage", "--csv", "-").out.count("\n") >= 2
    assert cli("billing", "checkpoint-storage", "--project-id").code == 2


def test_auth_whoami_and_status(cli):
    assert "local" in cli("auth", "whoami").out
    assert set(cli("auth", "whoami", "--json").json) == {"user_urn", "org_urn", "email"}
    status = cli("auth", "status")
    assert status.code == 0
    assert "Tinker accessible: yes" in status.out


def test_auth_status_of_a_dead_server_is_1(cli, monkeypatch):
    monkeypatch.setenv("TINKEX_CLIENT_RETRY_WINDOW_S", "0")
    monkeypatch.setenv("TINKEX_CLIENT_MAX_RETRIES", "0")
    ran = cli("--base-url", "http://127.0.0.1:9", "auth", "status")
    assert ran.code == 1
    assert "Tinker accessible: no" in ran.out
    assert cli("--base-url", "http://127.0.0.1:9", "auth", "whoami").code == 1


def test_auth_login_stores_a_key_the_server_accepts_and_logout_forgets_it(
    cli, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ran = cli("auth", "login")
    assert ran.code == 1
    assert "No key on stdin" in ran.err
    assert "\033" not in ran.err
    monkeypatch.setattr("sys.stdin", io.StringIO("tml-secret-key\n"))
    ran = cli("auth", "login")
    assert ran.code == 0, ran.err
    assert "tml-secret-key" not in ran.out + ran.err
    file = tmp_path / ".tinker" / "credentials.json"
    assert file.stat().st_mode & 0o777 == 0o600
    stored = json.loads(file.read_text())
    assert stored["keys"][stored["default"]]["key"] == "tml-secret-key"
    again = cli("auth", "login")
    assert again.code == 1
    assert "Already logged in" in again.err
    assert cli("auth", "logout").out == "Logged out.\n"
    assert "default" not in json.loads(file.read_text())
    assert cli("auth", "logout").code == 1


def test_checkpoint_save_of_a_fresh_adapter_and_of_another_checkpoint(cli, saved):
    model = ("--base-model", "tinkex/SmolLM2-135M-Instruct-Q4", "--rank", "2", "--seed", "1")
    assert "/weights/start" in cli("checkpoint", "save", "start", *model).out
    shown = cli("checkpoint", "save", "copy", "--from", saved.state_path, "--sampler", "--json")
    path = shown.json["tinker_path"]
    assert path.endswith("/sampler_weights/copy")
    assert cli("checkpoint", "info", path, "--json").json["lora_rank"] == 4


def test_checkpoint_save_needs_one_source(cli):
    assert cli("checkpoint", "save", "x").code == 2
    both = ("--from", "tinker://a:train:0/weights/x", "--base-model", "toy")
    assert cli("checkpoint", "save", "x", *both).code == 2
    assert cli("checkpoint", "save", "x", "--from", "nothing").code == 1
    missing = "tinker://nobody:train:0/weights/x"
    assert cli("checkpoint", "save", "x", "--from", missing).code == 1


def test_checkpoint_search_finds_by_metadata_type_and_model(cli, saved):
    by_note = ("checkpoint", "search", "--metadata", "note=first", "--limit", "0")
    table = cli(*by_note)
    assert "Base Model" in table.out
    found = cli(*by_note, "--type", "training", "--json").json["checkpoints"]
    assert saved.state_path in {item["tinker_path"] for item in found}
    assert {item["checkpoint_type"] for item in found} == {"training"}
    assert cli(*by_note, "--base-model", "none", "--json").json == {"checkpoints": []}
    assert len(cli("checkpoint", "search", "--limit", "1", "--json").json["checkpoints"]) == 1


def test_checkpoint_search_refuses_what_is_no_pair_and_a_project_of_nobody(cli):
    wrong = cli("checkpoint", "search", "--metadata", "note")
    assert (wrong.code, "'note' is not KEY=VALUE" in wrong.err) == (2, True)
    absent = cli("checkpoint", "search", "--project", "nobody")
    assert (absent.code, "No project 'nobody'" in absent.err) == (1, True)


def test_checkpoint_upload_sends_the_files_of_an_export(cli, saved, toy_server, tmp_path):
    from tinkex import ServiceClient

    with ServiceClient(base_url=toy_server) as service:
        training = service.create_training_client_from_state(saved.state_path)
        export = training.save_weights_external("out").result().path
    cli("checkpoint", "download", export, "-o", str(tmp_path))
    [folder] = tmp_path.iterdir()
    told = cli("checkpoint", "upload", str(folder), "--project", "p", "--json").json
    assert told["tinker_path"].endswith("/external_weights/uploaded")
    [found] = cli("checkpoint", "search", "--project", "p", "--json").json["checkpoints"]
    assert found["tinker_path"] == told["tinker_path"]


def test_checkpoint_upload_of_something_else_fails_before_it_sends(cli, tmp_path):
    ran = cli("checkpoint", "upload", str(tmp_path))
    assert (ran.code, "holds no adapter_config.json" in ran.err) == (1, True)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "base_model_name_or_path": "x"}')
    ran = cli("checkpoint", "upload", str(tmp_path))
    assert (ran.code, "holds no adapter_model.npz, manifest.json" in ran.err) == (1, True)

"""The root: help, exit codes, completion, and mistakes without a traceback."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys

import click
import pytest

from tinkex import __version__
from tinkex.cli.app import COMMANDS, run
from tinkex.cli.messages import words
from tinkex.errors import AuthenticationError, InvalidInputError


def test_help_lists_every_command_and_ends_with_0(cli):
    ran = cli("--help")
    assert ran.code == 0
    for name, line in COMMANDS.items():
        assert name in ran.out
        assert line in ran.out


def test_help_imports_no_command_and_nothing_heavy():
    code = (
        "import sys; from tinkex.cli.app import run; run(['--help']);"
        "bad = [m for m in ('torch', 'httpx', 'pydantic', 'fastapi', 'rich.console',"
        " 'tinkex.cli.commands.run', 'tinkex.server') if m in sys.modules];"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_loads_and_has_help(cli, name):
    ran = cli(name, "--help")
    assert ran.code == 0
    assert "Usage: tinkex" in ran.out
    assert "..." not in ran.out.partition("Commands:")[2], "every sentence is whole"


def test_every_option_has_a_help_line():
    """Nouns group, verbs act, and no option is left unexplained."""
    from tinkex.cli.app import cli as root

    def leaves(command, path):
        if isinstance(command, click.Group):
            with click.Context(command) as ctx:
                for name in command.list_commands(ctx):
                    yield from leaves(command.get_command(ctx, name), [*path, name])
        else:
            yield path, command

    for path, command in leaves(root, []):
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help, f"{' '.join(path)} {option.opts[0]}"


def test_version_is_one_line(cli):
    assert cli("version").out == cli("--version").out == f"tinkex {__version__}\n"
    assert cli("version", "--json").json == {"version": __version__}


def test_what_the_server_said_is_told_in_commands_and_without_the_request(cli):
    said = cli("run", "info", "nobody:train:0").err
    assert said == (
        "Error: No training run 'nobody:train:0' of yours. List them with `tinkex run list`.\n"
    )


def test_a_server_that_wants_a_key_says_so_when_none_is_set(
    cli, start_server, tmp_path, monkeypatch
):
    flags = ("--engine", "toy", "--api-key", "tml-secret=ada")
    with start_server(tmp_path, *flags) as base_url:
        ran = cli("--base-url", base_url, "run", "list")
        assert ran.code == 1
        assert "wants an API key and none is set: `tinkex auth login`" in ran.err
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        ran = cli("--base-url", base_url, "run", "list")
        assert "Check TINKER_API_KEY" in ran.err
        monkeypatch.delenv("TINKER_API_KEY")
        assert "Credentials available: no\n" in cli("--base-url", base_url, "auth", "status").out


def test_a_401_of_any_server_says_what_to_do(monkeypatch):
    """Servers of others say no more than that the key is wrong."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    refused = AuthenticationError("no", status_code=401, body={"detail": "Invalid key."})
    assert words(refused) == ("Invalid key. Check the key: `tinkex auth login`, or TINKER_API_KEY.")


def test_the_start_of_a_local_server_is_no_warning():
    code = (
        "import logging; from tinkex.cli.app import run; run(['version']);"
        "logging.getLogger('tinkex.local').warning('Starting %s', 'here');"
        "logging.getLogger('tinkex.other').warning('Beware')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "Starting here\nWARNING tinkex.other: Beware\n"


def test_the_next_command_is_named_so_that_it_runs(monkeypatch, tmp_path):
    """In a fresh clone nothing of ours is on the PATH yet."""
    from tinkex.cli.messages import program

    monkeypatch.setattr(sys, "argv", [".venv/bin/tinkex", "quickstart"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == ".venv/bin/tinkex"
    (tmp_path / "tinkex").touch(mode=0o755)
    assert program() == "tinkex"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(cli, shell):
    assert "_TINKEX_COMPLETE" in cli("completion", shell).out


def test_completion_of_an_unknown_shell_is_wrong_usage(cli):
    assert cli("completion", "tcsh").code == 2


def test_a_wrong_command_is_wrong_usage_and_names_the_closest(cli):
    ran = cli("chekpoint")
    assert ran.code == 2
    assert "Did you mean 'checkpoint'?" in ran.err
    assert ran.out == ""


def test_the_format_is_accepted_before_and_after_the_command(cli):
    assert cli("-f", "json", "model", "list").json == cli("model", "list", "--json").json


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InvalidInputError("seven is too many"), 1, "Error: seven is too many"),
        (KeyboardInterrupt(), 130, "Aborted!"),
        (ModuleNotFoundError("no", name="torch"), 1, "[local]'"),
        (RuntimeError("oops"), 1, "This looks like a bug in tinkex"),
        (FileNotFoundError(2, "No such file", "x.json"), 1, "x.json"),
    ],
)
def test_failures_end_with_their_code_and_no_traceback(monkeypatch, capsys, error, code, words):
    def fail():
        raise error

    monkeypatch.setattr("tinkex.cli.commands.shell.version.callback", fail)
    assert run(["version"]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_server_that_is_not_there_is_one_clear_line(cli, monkeypatch):
    monkeypatch.setenv("TINKEX_CLIENT_RETRY_WINDOW_S", "0")
    monkeypatch.setenv("TINKEX_CLIENT_MAX_RETRIES", "0")
    ran = cli("--base-url", "http://127.0.0.1:9", "run", "list")
    assert ran.code == 1
    assert ran.err.startswith("Error: ")
    assert "127.0.0.1:9" in ran.err


@pytest.mark.usefixtures("default_model_dir")
def test_the_sdk_alone_samples_without_torch_transformers_and_server(toy_server):
    """`pip install tinkex` brings none of them; a server elsewhere is all it needs."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors', 'fastapi', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "from tinkex.cli.app import run\n"
        "args = ['--base-url', sys.argv[1], 'sample', 'Hi', '--max-tokens', '16', '--seed', '1']\n"
        "sys.exit(run(args) or run(['serve']) - 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, toy_server], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "pip install" in done.stderr
    assert "[server]'" in done.stderr


def test_a_full_disk_is_called_so():
    from tinkex.cli.messages import words

    told = words(OSError(errno.ENOSPC, "No space left on device"))
    assert told.startswith("the disk is full. Make room (`tinkex disk`")


def test_a_file_that_cannot_be_written_is_named(cli):
    ran = cli("billing", "checkpoint-storage", "--csv", "/no/such/folder/x.csv")
    assert ran.err == "Error: /no/such/folder/x.csv: No such file or directory\n"


@pytest.mark.parametrize(
    ("args", "code", "exit_code"),
    [
        (["run", "info", "no-such-run", "--json"], "not_found", 1),
        (["--json", "model", "list", "gpt-99"], "failed", 1),
        (["chekpoint", "--json"], "usage", 2),
    ],
)
def test_with_json_an_error_is_one_object_on_stdout(cli, args, code, exit_code):
    ran = cli(*args)
    assert ran.code == exit_code
    assert ran.json["error"]["code"] == code
    assert ran.json["error"]["message"]
    assert "Error:" not in ran.err


def test_auth_status_prints_json(cli):
    assert cli("auth", "status", "--json").json == {
        "credentials": False,
        "needs_credentials": False,
        "accessible": True,
        "reason": None,
    }


def test_an_extra_is_installed_from_where_tinkex_came(monkeypatch, tmp_path):
    """A package that is on no index yet cannot be had from one."""
    from importlib import metadata

    from tinkex.errors import how_to_install

    class Installed:
        origin = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}

        def read_text(self, name):
            return json.dumps(self.origin)

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert how_to_install("local") == f"pip install -e '{tmp_path}[local]'"
    Installed.origin = {}
    assert how_to_install("local") == "pip install 'tinkex[local]'"


def test_ctrl_c_while_python_ends_shows_no_traceback(monkeypatch):
    from tinkex.cli import app

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(app, "run", lambda: 130)
    try:
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130

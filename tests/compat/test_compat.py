"""Programs written for the official SDK run on ours, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[1] / "peers"


def python(*args, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")} | env
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=500, env=variables
    )


def compat(*args, **options) -> subprocess.CompletedProcess[str]:
    return python("-m", "tinkex.compat", *args, **options)


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def official(tmp_path):
    """A folder with another package called `tinker` in it."""
    package = tmp_path / "site" / "tinker"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WHO = 'official'\n")
    (package / "secret_part.py").write_text("")
    return package.parent


def test_a_script_sees_our_objects_under_the_official_names():
    code = """
import tinker, tinkex
import tinker.types as types
from tinker import Datum, ServiceClient, TensorData as T
from tinker.types.tensor_data import TensorData
from tinker.types.model_input import ModelInput
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.retry_handler import RetryConfig
from tinker._exceptions import RequestFailedError
assert TensorData is T is tinkex.TensorData is types.TensorData
assert ServiceClient is tinkex.ServiceClient and RestClient is tinkex.RestClient
assert RequestFailedError is tinkex.RequestFailedError and ModelInput is tinkex.ModelInput
assert APIFuture is tinkex.APIFuture and RetryConfig is tinkex.RetryConfig
assert 'ServiceClient' in dir(tinker)
print(tinker.__version__)
"""
    assert said(compat("-c", code)).startswith("0.36")


@pytest.mark.parametrize("how", ["script", "module"])
def test_arguments_names_and_paths_are_those_of_python_itself(tmp_path, how):
    (tmp_path / "neighbour.py").write_text("X = 5\n")
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, tinker, neighbour\n"
        "print(__name__, sys.argv[1:], neighbour.X, tinker.AdamParams().beta2)\n"
    )
    if how == "script":
        done = compat(str(script), "--a", "b c")
    else:
        done = compat("-m", "program", "--a", "b c", path=tmp_path)
    assert said(done) == "__main__ ['--a', 'b c'] 5 0.95"


def test_an_installed_official_sdk_is_neither_used_nor_hidden_from_others(official):
    """Only this process is changed."""
    ours = compat("-c", "import tinker; print(hasattr(tinker, 'ServiceClient'))", path=official)
    theirs = python("-c", "import tinker; print(tinker.WHO)", path=official)
    assert (said(ours), said(theirs)) == ("True", "official")


def test_what_we_do_not_have_is_refused_and_never_taken_from_the_other_package(official):
    done = compat("-c", "import tinker.secret_part", path=official)
    assert "No module named 'tinker.secret_part'" in done.stderr
    done = compat("-c", "import tinker; tinker.WHO", path=official)
    assert "tinker.WHO is not provided by tinkex" in done.stderr


def test_it_comes_too_late_once_the_official_one_is_imported(official):
    done = python("-c", "import tinker, tinkex.compat; tinkex.compat.install()", path=official)
    assert "before the first import" in done.stderr


def test_errors_and_exit_codes_of_the_program_are_its_own(tmp_path):
    assert compat("-c", "raise SystemExit(7)").returncode == 7
    done = compat("-c", "1/0")
    assert (done.returncode, "ZeroDivisionError" in done.stderr) == (1, True)
    assert compat().returncode == 2
    assert compat("-m").returncode == 1


def test_objects_pickled_here_are_read_without_the_hook():
    code = "import pickle, tinker; print(pickle.dumps(tinker.ModelInput.from_ints([1, 2])).hex())"
    dumped = said(compat("-c", code))
    load = f"import pickle; print(pickle.loads(bytes.fromhex('{dumped}')).to_ints())"
    assert said(python("-c", load)) == "[1, 2]"


def test_the_version_of_the_distribution_is_the_generation_we_speak():
    code = "import importlib.metadata as m; print(m.version('tinker'), m.version('numpy') > '1')"
    assert said(compat("-c", code)) == "0.36.0 True"


def test_the_scenario_of_the_official_sdks_passes_on_ours(toy_server):
    """R32: the same file, byte for byte, that the official SDKs run in tests/peers."""
    done = compat(
        str(PEERS / "scenario.py"), TINKER_BASE_URL=toy_server, TINKER_API_KEY="tml-peer-key"
    )
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [step for step in steps if step["outcome"] == "failed"]
    assert not failed, (failed, done.stderr[-3000:])
    assert len(steps) > 20


def test_the_futures_of_clients_have_the_names_of_sdk_0_38():
    code = (
        "import tinker; from tinker.lib.public_interfaces import BackcompatSamplingClientFuture;"
        "print(issubclass(tinker.BackcompatTrainingClientFuture, tinker.APIFuture),"
        " BackcompatSamplingClientFuture.__name__)"
    )
    assert said(compat("-c", code)) == "True DirectFuture"

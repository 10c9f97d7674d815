"""What `make` does to a machine: nothing outside the clone and the cache folder, unless told to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def _dry(*arguments: str) -> str:
    """The commands that make would run; without what a make that runs this test was told."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "SYSTEM")}
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _installers() -> list[str]:
    """Scripts of this repository that call the system's package manager."""
    files = [file for folder in ("tests", "dev") for file in (ROOT / folder).rglob("*.sh")]
    return [file.name for file in files if "apt-get" in file.read_text()]


@needs_make
@pytest.mark.parametrize("target", ["test", "test-peers-quick", "test-browser", "test-quick"])
def test_only_system_1_installs_into_the_system(target):
    assert _installers() == ["install_chromium.sh"]
    assert not any(name in _dry(target) for name in _installers())
    assert not any(name in _dry(target, "SYSTEM=0") for name in _installers())
    assert ("install_chromium.sh" in _dry(target, "SYSTEM=1")) == (target != "test-quick")


@needs_make
def test_ci_runs_what_make_test_leaves_out():
    assert "not peers" in _dry("test")
    assert '-m "peers and not slow' in _dry("test-peers-quick")
    (command,) = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "make" in line
    ]
    assert {"SYSTEM=1", "test", "test-peers-quick"} <= set(command.split())


@needs_make
def test_an_upgraded_python_gets_its_environment_anew(tmp_path):
    """As Debian 12 that became 13: what was installed for 3.11 is nothing to 3.13."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "dev"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def make_venv(version: str, option: str) -> str:
        python = tmp_path / "python3"
        answer = f'case "$2" in *executable*) echo "$0" ;; *) echo {version} ;; esac'
        python.write_text(f"#!/bin/sh\n{answer}\n")
        python.chmod(0o755)
        run = ["make", option, "venv"]
        return subprocess.run(run, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE).stdout

    assert "environment.py .venv" in make_venv("3.11.2", "-n")
    make_venv("3.11.2", "--touch")
    assert "environment.py" not in make_venv("3.11.2", "-n")
    assert "environment.py .venv" in make_venv("3.13.5", "-n")


def test_a_test_run_leaves_no_file_in_the_folder_for_temporary_files(tmp_path):
    one = "tests/dev/test_environment.py::test_a_folder_that_is_no_environment_is_left_alone"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n", "1", one]
    subprocess.run(command, cwd=ROOT, env=env | {"TMPDIR": str(tmp_path)}, check=True)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_clean_cache_removes_what_is_ours_and_names_it(tmp_path):
    for name in ("venvs/sdk", "models/m", "somebody-elses"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TINKEX_CACHE": f"{tmp_path}/cache"}
    done = subprocess.run(
        ["sh", str(ROOT / "dev" / "clean_cache.sh")], env=env, capture_output=True, text=True
    )
    assert [line.split()[-1].rsplit("/", 1)[1] for line in done.stdout.splitlines()] == [
        "models",
        "venvs",
    ]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["somebody-elses"]

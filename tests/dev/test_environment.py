"""The environment that `make` prepares, on Pythons without ensurepip and on old ones."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("environment", TOP / "dev/environment.py")
assert SPEC
assert SPEC.loader
environment = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(environment)


def pip_wheel(folder: Path) -> Path:
    """A wheel of the pip that is installed here: its files as they are."""
    pip = importlib.metadata.distribution("pip")
    wheel = folder / f"pip-{pip.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in pip.files or []:
            if not str(file).startswith("..") and file.suffix != ".pyc":
                archive.write(str(pip.locate_file(file)), str(file))
    return wheel


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def index(folder: Path, digest: str | None = None) -> Iterator[str]:
    """A package index with one wheel of pip, on a port of this machine."""
    page = folder / "simple" / "pip"
    page.mkdir(parents=True)
    wheel = pip_wheel(page)
    digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
    (page / "index.html").write_text(
        f'<a href="pip-1.0-py3-none-any.whl#sha256=0">old</a>'
        f'<a href="{wheel.name}#sha256={digest}">new</a>'
    )
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, offline: None) -> None:
    """As Debian's python3 without python3-venv."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name)
    )


def test_without_ensurepip_pip_comes_from_the_package_index(tmp_path, bare, monkeypatch):
    folder = tmp_path / "a folder" / ".venv"
    with index(tmp_path) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        environment.make(folder)
    assert environment.works(folder / "bin" / "python")


def test_a_pip_with_another_digest_is_refused_and_nothing_is_left(tmp_path, bare, monkeypatch):
    folder = tmp_path / ".venv"
    with index(tmp_path, digest="0" * 64) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(SystemExit, match=r"another digest.*apt install python3\.\d+-venv"):
            environment.make(folder)
    assert not folder.exists()


def test_without_an_index_the_package_to_install_is_named_and_nothing_is_left(
    tmp_path, bare, monkeypatch
):
    folder = tmp_path / ".venv"
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(SystemExit, match=r"apt install python3\.\d+-venv"):
        environment.make(folder)
    assert not folder.exists()


def test_an_environment_that_was_left_without_pip_is_made_anew(tmp_path, bare, monkeypatch):
    """What Debian's `python3 -m venv` leaves behind when it fails."""
    folder = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    assert not environment.works(folder / "bin" / "python")
    with index(tmp_path) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        environment.make(folder)
    assert environment.works(folder / "bin" / "python")


def test_a_link_to_a_folder_that_is_gone_is_refused_and_left_alone(tmp_path):
    (tmp_path / ".venv").symlink_to(tmp_path / "on a disk that is not mounted")
    with pytest.raises(SystemExit, match="no virtual environment"):
        environment.make(tmp_path / ".venv")
    assert (tmp_path / ".venv").is_symlink()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="no virtual environment"):
        environment.make(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("build", "driver", "index_answers", "indexes", "told"),
    [
        (None, False, True, ["--extra-index-url", environment.CPU_INDEX], "CPU build"),
        (None, False, False, [], environment.CUDA_SIZE),
        (None, True, True, [], environment.CUDA_SIZE),
        ("cpu", True, True, ["--extra-index-url", environment.CPU_INDEX], "CPU build"),
        ("cuda", False, True, [], environment.CUDA_SIZE),
    ],
)
def test_torch_is_the_cpu_build_where_no_driver_is(
    build, driver, index_answers, indexes, told, monkeypatch, capsys
):
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(environment, "answers", lambda url: index_answers)
    monkeypatch.setattr(environment, "run_pip", lambda *args, **kwargs: False)
    monkeypatch.setattr(environment, "pip", lambda python, *args: installed.append(args))
    environment.install_torch(Path("python"), build)
    assert installed == [("torch", "--no-cache-dir", *indexes)]
    assert told in capsys.readouterr().err


def test_an_installation_that_does_not_fit_the_disk_is_refused(monkeypatch):
    monkeypatch.setattr(environment, "CPU_GB", 10**9)
    with pytest.raises(SystemExit, match="GB of free disk"):
        environment.check_disk(environment.CPU_GB)


def find_python(wanted: str, path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(TOP / "dev/find_python.sh"), wanted, "test"],
        env={"PATH": str(path), "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )


def old_python(folder: Path, name: str = "python3") -> None:
    """A program that answers as Ubuntu 22.04's Python does."""
    program = folder / name
    program.write_text(
        '#!/bin/sh\ncase "$2" in *version_info\\ \\>=*) exit 1 ;; esac\necho 3.10.12\n'
    )
    program.chmod(0o755)


def test_an_old_python_is_refused_with_the_line_to_type(tmp_path):
    old_python(tmp_path)
    run = find_python("python3", path=tmp_path, home=tmp_path)
    assert run.returncode == 1
    assert run.stdout == ""
    assert "python3 is Python 3.10.12" in run.stderr
    assert "uv python install 3.12 && make test PYTHON=3.12" in run.stderr


def test_beside_an_old_python_the_newer_one_is_named(tmp_path):
    old_python(tmp_path)
    (tmp_path / "python3.12").symlink_to(sys.executable)
    run = find_python("python3", path=tmp_path, home=tmp_path)
    assert run.returncode == 1
    assert "make test PYTHON=3.12" in run.stderr


def test_a_python_in_a_folder_with_a_space_is_found(tmp_path):
    folder = tmp_path / "new comer" / ".pyenv" / "versions" / "3.12.1" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    run = find_python("3.12", path=tmp_path, home=tmp_path / "new comer")
    assert (run.returncode, run.stdout.strip()) == (0, os.path.abspath(folder / "python"))

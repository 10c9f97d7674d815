"""Fixtures of the server's tests: an app in this process, and a real server process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import small_disk
from app_world import AppWorld, open_app
from server_process import ServerProcess
from wire_client import WireClient


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in small_disk.refusals:
        text = f"A FULL DISK WAS ONLY IMITATED (RLIMIT_FSIZE); run as root. mount: {reason}"
        terminalreporter.write_line(text, red=True, bold=True)


@pytest.fixture
async def app_world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    """A server in this process over the toy engine, reached without a socket."""
    async with open_app(tmp_path) as world:
        yield world


@pytest.fixture(scope="module")
def toy_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("toy"), "--engine", "toy") as server:
        yield server


@pytest.fixture
def client(toy_process: ServerProcess) -> Iterator[WireClient]:
    client = WireClient(toy_process.base_url)
    yield client
    client.close()

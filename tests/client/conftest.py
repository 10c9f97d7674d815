"""The harness of this folder's tests is importable: `virtual_time`, `hostile`, `recovery_world`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recovery_world import Server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """A running server; a test may kill it and need not start it again."""
    if not shared_server.is_running:
        shared_server.start()
    yield shared_server
    shared_server.disconnect()

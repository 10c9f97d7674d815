from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from moto_server import MotoServer


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def s3(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
    """The server, with its address and keys in the environment."""
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    return moto

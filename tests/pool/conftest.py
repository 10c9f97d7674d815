"""The tests of pools use the server's worlds, and a tiny real model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_llama import tiny_llama

TESTS = Path(__file__).resolve().parents[1]
for name in ("pool", "server", "engine"):
    sys.path.insert(0, str(TESTS / name))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random model."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder, max_position_embeddings=128)
    return str(folder)

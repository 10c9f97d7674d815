"""The security tests use the server's worlds: an app in this process, and a real server process."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
import fuzz
from app_world import AppWorld, open_app

KEYS = ("tml-ann=ann", "tml-bob=bob")


@pytest.fixture
async def app_world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    """A server in this process over the toy engine, reached without a socket."""
    async with open_app(tmp_path) as world:
        yield world


@pytest.fixture
async def two_keys(tmp_path: Path) -> AsyncIterator[AppWorld]:
    """The same with two users, `tml-ann` and `tml-bob`."""
    async with open_app(tmp_path, api_keys=KEYS) as world:
        yield world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    """The same over a toy that reads and writes words."""
    settings = fuzz.talking_toy(tmp_path / "model")
    async with open_app(tmp_path / "data", api_keys=KEYS, **settings) as world:
        await world.facts()
        yield world

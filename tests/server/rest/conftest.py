"""Fixtures of the REST tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "store"))
import store_rows as rows
from rest_world import KEYS, World, open_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path, KEYS) as made:
        made.store.sessions.create(rows.session(user_metadata={"team": "red"}))
        made.store.models.create(rows.model(user_metadata={"note": "x"}))
        yield made


@pytest.fixture
def open_server(tmp_path: Path) -> Callable[..., Any]:
    return lambda keys=(): open_world(tmp_path, keys)

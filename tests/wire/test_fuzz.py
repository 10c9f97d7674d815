"""Hostile bodies end in a Tinkex error and cost little memory. The bodies are made by fuzz.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.fixture(scope="module")
def outcome() -> dict:
    """100,000 damaged bodies and every bomb, in a process of their own."""
    command = [sys.executable, str(FUZZ), "--count", "100000", "--seed", "20261115"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_damaged_bodies_raise_nothing_but_wire_errors(outcome):
    """Most are refused; some damage, such as another number, leaves a good body."""
    assert outcome["bodies"] == 100_000
    assert 50_000 < outcome["refused"] < 100_000


def test_damaged_bodies_need_no_memory(outcome):
    assert outcome["fuzz_mib"] < 64


def test_no_bomb_takes_64_mib(outcome):
    assert len(outcome["bombs_mib"]) >= 20
    assert {name: mib for name, mib in outcome["bombs_mib"].items() if mib >= 64} == {}

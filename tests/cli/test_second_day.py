"""The second day: the walk of dev/second_day.py, short on the toy, whole on the default model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[2] / "dev" / "second_day.py"
pytestmark = pytest.mark.usefixtures("default_model_dir")


def walk(*options: str) -> None:
    done = subprocess.run([sys.executable, str(WALK), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_interrupted_runs_names_and_a_server_beside_the_private_one():
    """H4, H6, H7 and M5 of the trial, on the toy engine."""
    walk("--toy", "--short")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_command_of_the_second_day_does_what_it_must():
    walk()

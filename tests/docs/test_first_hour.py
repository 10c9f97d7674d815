"""docs/first-hour.md is walked command by command: dev/first_hour.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def walk():
    spec = importlib.util.spec_from_file_location("first_hour", ROOT / "dev" / "first_hour.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop(spec.name)


def test_the_page_has_its_commands_and_what_is_typed_into_them(walk):
    steps = walk.steps(walk.PAGE.read_text(encoding="utf-8"))
    commands = [step.command.split()[:2] for step in steps]
    assert ["tinkex", "quickstart"] in commands
    chat = next(step for step in steps if step.command.startswith("tinkex chat"))
    assert chat.typed[0] == "What is the capital of Austria?"
    assert chat.typed[-1] == "/exit"
    heredoc = next(step for step in steps if step.command.startswith("cat >"))
    assert heredoc.command.endswith("END")


@pytest.mark.parametrize(
    ("shown", "printed", "is_there"),
    [
        (
            "Held-out loss 4.63 -> 1.57 in 22 steps",
            "x\nHeld-out loss 4.1 -> 1.2 in 3 steps, 9 s",
            True,
        ),
        ("State  tinker://...", "\x1b[1mState\x1b[0m   tinker://abc:train:0/weights/x", True),
        ("first\nsecond", "second\nfirst", False),
        ("Arr...", "Yes, the capital", False),
    ],
)
def test_numbers_are_free_and_words_and_their_order_are_not(walk, shown, printed, is_there):
    assert (walk.missing(shown, printed) is None) == is_there


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_first_hour_goes_as_the_page_says(default_model_dir):
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev" / "first_hour.py")],
        env={**os.environ, "TINKEX_CACHE": str(default_model_dir.parents[1])},
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, done.stdout + done.stderr

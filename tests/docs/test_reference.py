"""`--help` equals the docs, and every setting is documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_pages_are_what_the_code_says():
    done = subprocess.run(
        [sys.executable, "dev/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_server_setting_has_a_meaning():
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    server = text.split("## Client")[0]
    empty = [
        line for line in server.splitlines() if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not empty

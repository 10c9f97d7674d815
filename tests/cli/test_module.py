"""`python -m tinkex` is the command line."""

from __future__ import annotations

import subprocess
import sys


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "tinkex", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.startswith("tinkex ")

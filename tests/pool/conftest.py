"""The tests of pools use the server's worlds, and tiny real models of the engine's tests."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in ("pool", "server", "engine"):
    sys.path.insert(0, str(TESTS / folder))

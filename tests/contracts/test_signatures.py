"""The signatures of the clients are those docs/parity.md promises."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from signatures import section, written


def test_the_signatures_are_those_of_the_parity_page() -> None:
    """A change is made on purpose: `python tests/contracts/signatures.py --write`."""
    assert written().splitlines() == section().splitlines()

"""A data folder of an earlier day opens and goes on as it would have then."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_database import unpack
from recorded_store import EXPECTED, go_on


async def test_a_recorded_journal_is_replayed_to_the_same_losses_and_weights(
    tmp_path: Path,
) -> None:
    expected = json.loads(EXPECTED.read_text())
    unpack(tmp_path)
    assert await go_on(tmp_path, list(expected)) == expected

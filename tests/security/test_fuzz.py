"""Damaged requests to every endpoint. `make fuzz` sends thousands to each."""

from __future__ import annotations

from pathlib import Path

from fuzz import attack


async def test_no_endpoint_answers_500_or_hangs(tmp_path: Path) -> None:
    told = await attack(tmp_path, count=16, seed=7)
    assert told["endpoints"] > 70
    assert told["still_trains"]
    assert {200, 400, 404} <= told["statuses"].keys()

"""Kills and stops at random moments, `dev/chaos.py`: a few here, fifty in the slow tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev"))
from chaos import Chaos, Outcome

SEED = int(os.environ.get("TINKEX_KILL_SEED", "0"))


def check(chaos: Chaos, tmp_path: Path, model: Path) -> Outcome:
    calm, disturbed = chaos.run(tmp_path, model)
    assert calm.told
    print(f"\nundisturbed: {calm}\ndisturbed: {disturbed}")
    assert chaos.differences(calm, disturbed) == []
    assert sum(disturbed.kills.values()) == chaos.kills
    assert disturbed.num_replays >= chaos.kills // 10, "most came when there was nothing to lose"
    return disturbed


def test_a_few_kills_and_stops_leave_no_trace(tmp_path: Path, tiny_model: Path) -> None:
    """Our SDK; the whole way, split passes included, on the engine that computes."""
    check(Chaos(kills=4, seed=SEED, sdk="ours", steps=6), tmp_path, tiny_model)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("sdk", ["official", "ours"])
def test_fifty_kills_and_stops_leave_no_trace_in_a_shared_run(
    tmp_path: Path, tiny_model: Path, sdk: str, deterministic: bool
) -> None:
    """Losses, samples and files: to the bit, or within float32 sums in another order."""
    chaos = Chaos(seed=SEED, sdk=sdk, deterministic=deterministic)
    disturbed = check(chaos, tmp_path, tiny_model)
    assert disturbed.num_shares >= 2, "the run was hardly shared"

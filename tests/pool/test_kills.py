"""Twenty SIGKILLs in a run of thirty steps on two workers that share it: only a pause."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from kills import HERE, Killer, kill_process, official_run
from server_process import ServerProcess

EAGER = (str(HERE / "eager_server.py"),)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(1900)
def test_twenty_kills_of_workers_and_server_leave_no_trace_in_a_shared_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Losses, samples and weights are equal to the bit. TINKEX_KILL_SEED draws other moments."""
    flags = ("--engine", "torch", "--device", "cpu", "--deterministic", "--model", str(tiny_model))
    flags += ("--snapshot-every", "21")
    with ServerProcess(tmp_path / "one", *flags) as server:
        expected = official_run(server, tiny_model)
    chance = random.Random(1)
    with ServerProcess(tmp_path / "two", *flags, "--workers", "2", program=EAGER) as server:

        def kill_one() -> None:
            if pids := server.worker_pids():
                kill_process(chance.choice(pids))

        def kill_server() -> None:
            server.kill()
            server.start()

        weapons = {"worker": kill_one, "workers": server.kill_worker, "server": kill_server}
        killer = Killer(weapons, seed=int(os.environ.get("TINKEX_KILL_SEED", "0")))
        killed = official_run(server, tiny_model, killer)
    print(f"\none worker, undisturbed: {expected}\ntwo workers: {killed}")
    assert not killer.moments, "the run ended before every kill was made"
    assert killed.told == expected.told
    assert killed.weights == expected.weights
    assert expected.weights
    assert killed.num_shares >= 2, "the run was hardly shared"
    assert killed.num_replays >= 5, "most kills came when there was nothing to lose"

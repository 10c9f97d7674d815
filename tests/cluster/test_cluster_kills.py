"""Twenty SIGKILLs in a run of thirty steps on the nodes of a cluster: only a pause."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pool"))
from kills import HERE, Killer, kill_process, official_run
from ray_cluster import RayCluster
from server_process import ServerProcess

EAGER = (str(HERE / "eager_server.py"),)


def engine_pids(cluster: RayCluster) -> list[int]:
    """The processes of the actors of this cluster, which other clusters' are not."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if (folder / "cmdline").read_bytes().startswith(b"ray::EngineHost"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != cluster.pid:
            pid = parents.get(pid, 0)
        return pid == cluster.pid

    return [pid for pid in found if is_ours(pid)]


@pytest.mark.peers
@pytest.mark.timeout(1900)
def test_twenty_kills_of_engines_nodes_and_server_leave_no_trace_in_a_shared_run(
    cluster: RayCluster, tmp_path: Path, tiny_model: Path
) -> None:
    """Losses, samples and weights are equal to the bit. TINKEX_KILL_SEED draws other moments."""
    flags = ("--engine", "torch", "--device", "cpu", "--deterministic", "--model", str(tiny_model))
    flags += ("--snapshot-every", "21")
    with ServerProcess(tmp_path / "one", *flags) as server:
        expected = official_run(server, tiny_model)
    seed = int(os.environ.get("TINKEX_KILL_SEED", "0"))
    chance = random.Random(seed)
    nodes = [cluster.add(), cluster.add()]
    with ServerProcess(tmp_path / "two", *flags, "--ray", cluster.address, program=EAGER) as server:

        def kill_engine() -> None:
            if pids := engine_pids(cluster):
                kill_process(chance.choice(pids))

        def kill_node() -> None:
            cluster.kill(nodes.pop(chance.randrange(2)))
            nodes.append(cluster.add())

        def kill_server() -> None:
            server.kill()
            server.start()

        weapons = {"engine": kill_engine, "node": kill_node, "server": kill_server}
        killer = Killer(weapons, seed=seed)
        killed = official_run(server, tiny_model, killer)
    for node in nodes:
        cluster.kill(node)
    print(f"\none worker, undisturbed: {expected}\ntwo nodes: {killed}")
    assert not killer.moments, "the run ended before every kill was made"
    assert killed.told == expected.told
    assert killed.weights == expected.weights
    assert killed.num_replays >= 5, "most kills came when there was nothing to lose"

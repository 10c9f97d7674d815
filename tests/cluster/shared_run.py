"""A run on one worker of this machine, and the same on all nodes of a Ray cluster together.

A program, because ray in a test's own process would print there. Says what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pool"))
from pools import TOY, Run, always_split, child, opened, torch_member
from test_shared_training import whole_run

from tinkex.cluster.connection import Cluster
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.cluster_pool import ClusterPool, PoolPlan


async def main(address: str, folder: Path, model: str) -> None:
    always_split(pytest.MonkeyPatch())
    is_toy = model == "toy"
    one = child(TOY) if is_toy else torch_member(deterministic=True)
    async with opened([one], folder / "one" / "rendezvous") as pool:
        alone = Run(pool, model)
        end = await whole_run(alone, folder / "one")
    rendezvous = folder / "two" / "rendezvous"
    cluster = await asyncio.to_thread(Cluster.connect, address)
    spec = WorkerSpec(engine=TOY) if is_toy else WorkerSpec(engine="torch", deterministic=True)
    plan = PoolPlan(spec=spec, rendezvous=rendezvous, all_reduce_timeout_s=60.0)
    members = await asyncio.to_thread(ClusterPool, cluster, plan)
    await members.start()
    await asyncio.gather(*(member.wait_ready() for member in members.members))
    together = Run(members, model)
    end_together = await whole_run(together, folder / "two")
    left = [file.name for file in rendezvous.iterdir()]
    await members.close()
    said = {
        "num_workers": together.most_workers,
        "is_equal": together.seen == alone.seen and end_together == end,
        "left": left,
        "have_summed": members.groups is not None and members.groups.num_sums > 0,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))

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
from pools import TOY, Run, always_split, child, opened
from test_shared_training import whole_run

from tinkex.cluster.connection import Cluster
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.cluster_pool import ClusterPool, Wish


async def main(address: str, folder: Path) -> None:
    always_split(pytest.MonkeyPatch())
    async with opened([child(TOY)], folder / "one" / "exchange") as pool:
        alone = Run(pool, "toy")
        end = await whole_run(alone, folder / "one")
    exchange = folder / "two" / "exchange"
    cluster = await asyncio.to_thread(Cluster.connect, address)
    wish = Wish(spec=WorkerSpec(engine=TOY), exchange=exchange)
    members = await asyncio.to_thread(ClusterPool, cluster, wish)
    await members.start()
    await asyncio.gather(*(member.wait_ready() for member in members.members))
    together = Run(members, "toy")
    end_together = await whole_run(together, folder / "two")
    left = [file.name for file in exchange.iterdir()]
    await members.close()
    said = {
        "num_workers": together.most_workers,
        "is_equal": together.seen == alone.seen and end_together == end,
        "left": left,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))

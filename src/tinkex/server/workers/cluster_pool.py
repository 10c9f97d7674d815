"""A pool whose members are engines on the nodes of a Ray cluster.

Every GPU of every node has a member; where no node has one, every node has a member on its CPUs,
or as many as were asked for, spread over the nodes. With groups a member has several devices, all
of one node. Nodes that join are looked at and used, those that leave take their members with them:
the cluster is asked every few seconds. A node that lacks the model's files or runs other code is
left out, and the log and `tinkex cluster status` say why; it is looked at again, in case somebody
helps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tinkex.cluster import node_facts
from tinkex.cluster.connection import Cluster, Node
from tinkex.engine.registry.engines import engine_kind
from tinkex.errors import ConfigError
from tinkex.server.workers.child import WorkerSpec
from tinkex.server.workers.pool import Pool
from tinkex.server.workers.remote_worker import RemoteWorker
from tinkex.server.workers.watchdog import Budget

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
LOOK_AGAIN_S = 60.0
"""How long a node that was left out is not asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The members that a pool on a cluster has, and their settings."""

    spec: WorkerSpec
    num_workers: int = 0
    """0: one for each GPU, or one for each node where there are none."""
    group_size: int = 1
    """Devices of a member."""
    start_timeout_s: float = 300.0
    budget: Budget = field(default_factory=Budget)
    rendezvous: Path | None = None
    """A folder on the server's disk for adapters that members share; None: none is shared."""
    all_reduce_timeout_s: float = 30.0
    """How long members that share an adapter wait for each other; 0: none is shared."""


class Survey:
    """Which nodes can be used, and why the others cannot."""

    def __init__(self, cluster: Cluster, plan: PoolPlan) -> None:
        self._cluster = cluster
        self._plan = plan
        self._ours = node_facts.look(())
        self._good: set[str] = set()
        self.left_out: dict[str, str] = {}
        """Why, by node id."""
        self._looked_at: dict[str, float] = {}

    def look(self) -> list[Node]:
        """The nodes that can be used now. Blocks while new ones are asked."""
        nodes = self._cluster.nodes()
        alive = {node.node_id for node in nodes}
        self._good &= alive
        self.left_out = {k: v for k, v in self.left_out.items() if k in alive}
        limit = time.monotonic() - LOOK_AGAIN_S
        unknown = [n for n in nodes if n.node_id not in self._good]
        unknown = [n for n in unknown if self._looked_at.get(n.node_id, limit) <= limit]
        for node_id, facts in self._cluster.facts(unknown, self._plan.spec.models).items():
            reason = facts if isinstance(facts, str) else node_facts.objection(facts, self._ours)
            self._looked_at[node_id] = time.monotonic()
            if not reason:
                self._good.add(node_id)
                self.left_out.pop(node_id, None)
            else:
                self.leave_out(next(n for n in unknown if n.node_id == node_id), reason)
        return [node for node in nodes if node.node_id in self._good]

    def leave_out(self, node: Node, reason: str) -> None:
        self._good.discard(node.node_id)
        self._looked_at[node.node_id] = time.monotonic()
        if self.left_out.get(node.node_id) != reason:
            logger.warning("node %s is left out: %s", node, reason)
        self.left_out[node.node_id] = reason


class ClusterPool(Pool):
    def __init__(self, cluster: Cluster, plan: PoolPlan) -> None:
        """Blocks while the nodes are asked.

        Raises:
            ConfigError: There is no node that can be used, or too few devices.
        """
        self._cluster = cluster
        self._plan = plan
        self._survey = Survey(cluster, plan)
        self._num_made = 0
        self._follower: asyncio.Task[None] | None = None
        nodes = self._survey.look()
        self._check(nodes)
        members = [self._make(node) for node in self._missing(nodes, [])]
        spec = plan.spec
        super().__init__(
            members,
            name="the cluster",
            rendezvous=plan.rendezvous,
            all_reduce_timeout_s=plan.all_reduce_timeout_s,
            deterministic=spec.deterministic or engine_kind(spec.engine).splits_exactly,
        )
        self._count()

    # ------------------------------------------------------------------------ members

    def _check(self, nodes: Sequence[Node]) -> None:
        if not nodes:
            raise ConfigError(
                "no node of the Ray cluster can be used. "
                + "; ".join(f"{node[:8]}: {why}" for node, why in self._survey.left_out.items())
            )
        num_places = sum(self._places(nodes).values())
        if num_places == 0 and self._plan.group_size > 1:
            raise ConfigError(
                f"--group is {self._plan.group_size}, and no node of the Ray cluster has as many "
                f"devices ({_offers(nodes)}). The members of a group are on one node."
            )
        if num_places == 0:
            raise ConfigError("the nodes of the Ray cluster offer neither GPUs nor CPUs.")
        if self._plan.num_workers > num_places:
            what = "devices" if self._plan.group_size == 1 else "places"
            raise ConfigError(
                f"--workers is {self._plan.num_workers}, and the cluster has {num_places} {what} "
                f"for them ({_offers(nodes)}). Ask for fewer, or add nodes."
            )

    def _uses_gpus(self, nodes: Sequence[Node]) -> bool:
        spec = self._plan.spec
        wants = engine_kind(spec.engine).uses_devices and not spec.device.startswith("cpu")
        return wants and any(node.num_gpus for node in nodes)

    def _places(self, nodes: Sequence[Node]) -> Counter[str]:
        """How many members each node may have."""
        size = self._plan.group_size
        if self._uses_gpus(nodes):
            return Counter({node.node_id: node.num_gpus // size for node in nodes})
        if self._plan.num_workers:
            return Counter({node.node_id: node.num_cpus // size for node in nodes})
        return Counter({node.node_id: min(1, node.num_cpus // size) for node in nodes})

    def _missing(self, nodes: Sequence[Node], members: Sequence[RemoteWorker]) -> list[Node]:
        """The nodes of members to add: on the emptiest first, so that they spread."""
        places = self._places(nodes)
        num_wanted = self._plan.num_workers or sum(places.values())
        taken = Counter(member.node.node_id for member in members)
        added: list[Node] = []
        while len(members) + len(added) < num_wanted:
            free = [node for node in nodes if taken[node.node_id] < places[node.node_id]]
            if not free:
                break
            node = min(free, key=lambda node: taken[node.node_id])
            taken[node.node_id] += 1
            added.append(node)
        return added

    def _make(self, node: Node) -> RemoteWorker:
        self._num_made += 1
        size = self._plan.group_size
        # Sums may depend on the number of threads: in deterministic mode all have as many as one
        # would have there.
        spec = self._plan.spec
        is_free = bool(self._plan.num_workers) or spec.deterministic
        threads = None if is_free else max(1, node.num_cpus // size)
        return RemoteWorker(
            self._cluster,
            node,
            replace(spec, threads=threads),
            name=f"worker-{self._num_made - 1}",
            num_devices=size,
            uses_gpus=self._uses_gpus([node]),
            start_timeout_s=self._plan.start_timeout_s,
            budget=self._plan.budget,
        )

    # ------------------------------------------------------------------------ following

    async def start(self) -> None:
        await super().start()
        self._follower = asyncio.create_task(self._follow(), name="cluster")

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await super().close()
        await asyncio.to_thread(self._cluster.close)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._adapt()
            except Exception:
                logger.exception("the cluster could not be asked; next time in %g s", LOOK_EVERY_S)

    async def _adapt(self) -> None:
        """Have members where nodes are."""
        for member in self._remote():
            if member.refusal:
                self._survey.leave_out(member.node, member.refusal)
        nodes = await asyncio.to_thread(self._survey.look)
        usable = {node.node_id for node in nodes}
        kept = [member for member in self._remote() if member.node.node_id in usable]
        for node in self._missing(nodes, kept):
            logger.info("node %s gets a worker", node)
            await self.add(self._make(node))
        for member in self._remote():
            if member.node.node_id not in usable and self.size > 1:
                logger.warning("node %s is gone, and %s with it", member.node, member.name)
                await self.remove(member)
        self._count()

    def _count(self) -> None:
        self.num_nodes = len({member.node.node_id for member in self._remote()})
        self.num_left_out = len(self._survey.left_out)

    def _remote(self) -> list[RemoteWorker]:
        return [member for member in self.members if isinstance(member, RemoteWorker)]


def _offers(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{n}: {n.num_gpus} GPUs, {n.num_cpus} CPUs" for n in nodes)

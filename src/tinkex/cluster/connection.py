"""A Ray cluster: join it, look at its nodes, and start an engine on one of them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.cluster import node_facts
from tinkex.cluster.engine_host import EngineHost, clear_scratch
from tinkex.cluster.node_facts import NodeFacts
from tinkex.cluster.parcels import Parcels
from tinkex.cluster.remote_engine import RemoteEngine
from tinkex.engine.jobs import Engine
from tinkex.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from types import ModuleType

NAMESPACE = "tinkex"
CONNECT_S = 5.0
PROBE_S = 60.0
_LABEL = "ray.io/node-id"
_GROUPS = {"jobs": 1, "events": 1, "files": 2, "control": 1}
"""Threads of an actor: a file on its way holds up no job, and a job no question."""


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    address: str
    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.address} ({self.node_id[:8]})"


class Cluster:
    def __init__(self, address: str, ray: ModuleType) -> None:
        self.address = address
        self._ray = ray
        self._stdout = sys.stdout
        sys.stdout = sys.stderr  # ray prints what nodes say; stdout is for our own results
        self._parcels = Parcels(ray)

    @classmethod
    def connect(cls, address: str) -> Cluster:
        """Join a running cluster. Blocks for seconds; never starts one.

        Raises:
            ConfigError: There is none, or ray is not installed.
        """
        try:
            import ray
        except ImportError as exc:
            raise ConfigError(
                f"a cluster needs Ray, which is not installed: {how_to_install('cluster')}."
            ) from exc
        if address != "auto":
            _check_address(address)
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as exc:
            raise ConfigError(_no_cluster(address, exc)) from exc
        return cls(address, ray)

    def close(self) -> None:
        self._ray.shutdown()
        sys.stdout = self._stdout

    # ------------------------------------------------------------------------ nodes

    def nodes(self) -> list[Node]:
        """The nodes that are alive. Blocks shortly."""
        return [
            Node(
                node_id=row["NodeID"],
                address=row["NodeManagerAddress"],
                num_cpus=int(row["Resources"].get("CPU", 0)),
                num_gpus=int(row["Resources"].get("GPU", 0)),
            )
            for row in self._ray.nodes()
            if row["Alive"]
        ]

    def facts(self, nodes: Sequence[Node], models: Sequence[str]) -> dict[str, NodeFacts | str]:
        """The facts of each node by its id; a text where it gives none. Blocks till they answer."""
        # Without a CPU of its own, it also runs on a node whose CPUs all belong to engines.
        probe = self._ray.remote(num_cpus=0, max_retries=0)(node_facts.look)
        refs = {n.node_id: probe.options(**self._pinned(n)).remote(models) for n in nodes}
        facts: dict[str, NodeFacts | str] = {}
        for node_id, ref in refs.items():
            try:
                facts[node_id] = self._ray.get(ref, timeout=PROBE_S)
            except self._ray.exceptions.RayError as exc:
                facts[node_id] = f"it does not answer: {str(exc).strip().splitlines()[-1][:200]}"
        return facts

    def _pinned(self, node: Node) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}

    # ------------------------------------------------------------------------ engines

    async def start_engine(
        self,
        node: Node,
        *,
        name: str,
        num_cpus: int,
        num_gpus: int,
        build: Callable[[Any], Engine],
        spec: Any,
        log_level: str,
    ) -> RemoteEngine:
        """An actor on that node, in a placement group of its own. Returns before it is ready.

        The members of a group of devices are children of the actor, which has all their devices.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": float(num_cpus)} | ({"GPU": float(num_gpus)} if num_gpus else {})
        group = placement_group(
            [bundle], strategy="STRICT_PACK", bundle_label_selector=[{_LABEL: node.node_id}]
        )
        actor = self._ray.remote(concurrency_groups=_GROUPS)(EngineHost).options(
            # Servers share the namespace, in which a name can be used only once.
            name=f"{name}-{secrets.token_hex(4)}",
            namespace=NAMESPACE,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            # Ray would bring it back empty and tell nobody; the server starts another by itself.
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=0
            ),
        )
        handle = actor.remote(build, spec, node.node_id, log_level)
        return RemoteEngine(self._ray, handle, group, self._parcels, self._killer(node))

    def _killer(self, node: Node) -> Callable[[int], None]:
        """Ends a process on the node for certain: one that hangs does not hear an actor's end."""
        end = self._ray.remote(num_cpus=0, max_retries=0)(_end_process)
        return lambda pid: end.options(**self._pinned(node)).remote(pid)

    def engines(self) -> list[dict[str, Any]]:
        """The engines on this cluster, of all servers, for `tinkex cluster status`. Blocks."""
        from ray.util import list_named_actors

        engines = []
        for row in list_named_actors(all_namespaces=True):
            if row["namespace"] != NAMESPACE:
                continue
            try:
                actor = self._ray.get_actor(row["name"], namespace=NAMESPACE)
                facts = self._ray.get(
                    actor.facts.options(concurrency_group="control").remote(), timeout=10
                )
            except (self._ray.exceptions.RayError, ValueError):
                facts = {"node_id": "", "trouble": "does not answer"}
            engines.append({"name": row["name"], **facts})
        return engines


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise ConfigError(f"--ray takes auto or HOST:PORT (of `ray start`), got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        raise ConfigError(
            f"nobody listens at {address}, so there is no Ray cluster to join ({exc}). Start one "
            "with `ray start --head` and give the address that it prints."
        ) from exc


def _no_cluster(address: str, exc: Exception) -> str:
    lines = str(exc).strip().splitlines()
    if address == "auto":
        return (
            "no Ray cluster runs on this machine. Start one with `ray start --head`, or join one "
            f"with `ray start --address HOST:PORT`. ({lines[0][:200] if lines else exc})"
        )
    return (
        f"cannot join the Ray cluster at {address}: {lines[0][:300] if lines else exc}. This "
        f"machine must be one of its nodes: run `ray start --address {address}` here first."
    )


def _end_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    clear_scratch()

"""A Ray cluster of several nodes on this machine, in a process of its own.

`RayCluster` is the test's side. Run as a program this file is the other side: it reads one JSON
command a line and answers each with one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 80 * 2**20


class RayCluster:
    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.address: str = self._ask({"start": True})["address"]

    @property
    def pid(self) -> int:
        """The process that all nodes were started by."""
        return self._process.pid

    def add(self, *, num_cpus: int = 1, env: dict[str, str] | None = None) -> str:
        """Start a node; gives its id."""
        return str(self._ask({"add": num_cpus, "env": env or {}})["node_id"])

    def kill(self, node_id: str) -> None:
        """End a node's raylet by SIGKILL; what ran on it goes too."""
        self._ask({"kill": node_id})

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._process.stdout.close()
        self._log.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the cluster's process ended; see {self._log.name}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ray prints is no answer
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,  # the server's own machine, which has no device to offer
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        },
    )
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {"address": cluster.address}
        if "add" in command:
            node = cluster.add_node(
                num_cpus=command["add"],
                object_store_memory=OBJECT_STORE_BYTES,
                env_vars=command["env"] or None,
            )
            nodes[node.node_id] = node
            answer["node_id"] = node.node_id
        elif "kill" in command:
            if (node := nodes.pop(command["kill"], None)) is not None:
                cluster.remove_node(node, allow_graceful=False)
        print(json.dumps(answer), file=answers, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

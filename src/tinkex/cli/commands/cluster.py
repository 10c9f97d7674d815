"""`tinkex cluster ...`: look at the Ray cluster that a server's workers run on.

Joins the cluster from this machine, which must be one of its nodes; needs no server and no key.
"""

from __future__ import annotations

from typing import Any

import click

from tinkex.cli.listing import Listing
from tinkex.cli.state import Noun, State, pass_state

_NODES = Listing(
    "nodes",
    "Nodes",
    {
        "Address": "address",
        "Node": lambda node: node["node_id"][:8],
        "GPUs": "num_gpus",
        "CPUs": "num_cpus",
        "Workers": "num_workers",
        "Busy": "num_busy",
        "Usable": "verdict",
    },
)


@click.group(cls=Noun)
def cluster() -> None:
    """Look at the Ray cluster of your own server."""


@cluster.command()
@click.option("--ray", "address", default="auto", help="auto or HOST:PORT, as for serve.")
@click.option("--model", "models", multiple=True, help="Model path that nodes must have.")
@pass_state
def status(state: State, /, address: str, models: tuple[str, ...]) -> None:
    """Show nodes, whether they can be used, and the workers on them."""
    from tinkex.cluster import node_facts
    from tinkex.cluster.connection import Cluster

    joined = Cluster.connect(address)
    try:
        nodes, engines = joined.nodes(), joined.engines()
        facts_of, ours = joined.facts(nodes, models), node_facts.look(())
    finally:
        joined.close()
    rows: list[dict[str, Any]] = []
    for node in nodes:
        facts = facts_of[node.node_id]
        why = facts if isinstance(facts, str) else node_facts.objection(facts, ours)
        there = [engine for engine in engines if engine["node_id"] == node.node_id]
        rows.append(
            {
                "node_id": node.node_id,
                "address": node.address,
                "num_gpus": node.num_gpus,
                "num_cpus": node.num_cpus,
                "num_workers": len(there),
                "num_busy": sum(bool(engine.get("is_busy")) for engine in there),
                "verdict": why or "ok",
            }
        )
    state.show_items(_NODES, rows, workers=engines)

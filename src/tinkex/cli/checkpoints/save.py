"""`tinkex checkpoint save`: a checkpoint of a fresh adapter, or of another one under a new name.

A fresh adapter changes nothing yet, which makes its checkpoint a place to start several runs from.
"""

from __future__ import annotations

import click

from tinkex.cli.arguments import check_tinker_path
from tinkex.cli.output import properties
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@click.argument("name")
@click.option("--base-model", help="Start a fresh adapter on this model.")
@click.option("--from", "source", callback=check_tinker_path, help="Or take this checkpoint.")
@click.option("--rank", type=click.IntRange(min=1), default=32, help="LoRA rank of a fresh one.")
@click.option("--seed", type=int, help="Seed of a fresh one's weights.")
@click.option("--sampler", is_flag=True, help="For sampling only, without optimizer state.")
@click.option("--ttl", type=int, metavar="SECONDS", help="Delete it this long from now.")
@pass_state
def save(
    state: State,
    name: str,
    base_model: str | None,
    source: str | None,
    rank: int,
    seed: int | None,
    sampler: bool,
    ttl: int | None,
) -> None:
    """Save a checkpoint called NAME."""
    if (base_model is None) == (source is None):
        raise click.UsageError("Give exactly one of --base-model and --from.")
    with state.service() as service:
        if source is not None:
            training = service.create_training_client_from_state(source)
        else:
            assert base_model is not None
            training = service.create_lora_training_client(base_model, rank=rank, seed=seed)
        if sampler:
            path = training.save_weights_for_sampler(name, ttl_seconds=ttl).result().path
        else:
            path = training.save_state(name, ttl_seconds=ttl).result().path
    state.show(
        properties(None, {"Checkpoint": path, "Run": training.model_id}),
        {"tinker_path": path, "training_run_id": training.model_id},
    )

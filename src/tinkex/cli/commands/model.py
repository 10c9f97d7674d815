"""`tinkex model list`: what the server can train and sample."""

from __future__ import annotations

import click

from tinkex.cli.output import Table
from tinkex.cli.state import Noun, State, pass_state


@click.group(cls=Noun)
def model() -> None:
    """What the server can train and sample."""


@model.command("list")
@click.argument("substring", required=False, default="")
@pass_state
def list_(state: State, substring: str) -> None:
    """List the server's models, or those whose name contains SUBSTRING (any case)."""
    with state.service(patient=False) as service:
        models = list(service.get_server_capabilities().supported_models)
    found = [m for m in models if substring.lower() in (m.model_name or "").lower()]
    if substring and not found:
        names = ", ".join(sorted(m.model_name or "?" for m in models)) or "no model at all"
        raise click.ClickException(f"No model matches '{substring}'; this server has: {names}.")
    state.show(
        Table(
            title=f"Models ({len(found)})",
            columns=("Model", "Max Context", "Trainable", "Sampleable"),
            rows=[(m.model_name, m.max_context_length, m.trainable, m.sampleable) for m in found],
        ),
        {"models": found},
    )

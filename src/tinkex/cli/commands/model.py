"""`tinkex model`: what the server can train and sample, and what a server of ours could."""

from __future__ import annotations

import click

from tinkex.cli.completions import complete_model
from tinkex.cli.listing import Listing
from tinkex.cli.messages import program
from tinkex.cli.state import Noun, State, pass_state

_MODELS = Listing(
    "models",
    "Models",
    {
        "Model": "model_name",
        "Max Context": "max_context_length",
        "Trainable": "trainable",
        "Sampleable": "sampleable",
    },
)
_FAMILIES = Listing("families", "", {"Type": "type", "Such as": "such_as", "Runs": "runs"})


@click.group(cls=Noun, help="What the server can train and sample.")
def model() -> None:
    """Models of the server."""


@model.command("list")
@click.argument("substring", required=False, default="")
@pass_state
def list_(state: State, substring: str) -> None:
    """List the server's models, or those whose name contains SUBSTRING (any case)."""
    with state.service(patient=False) as service:
        models = list(service.get_server_capabilities().supported_models)
    matching = [m for m in models if substring.lower() in (m.model_name or "").lower()]
    if substring and not matching:
        names = ", ".join(sorted(m.model_name or "?" for m in models)) or "no model at all"
        raise click.ClickException(f"No model matches '{substring}'; this server has: {names}.")
    for m in matching:
        if m.note and m.stands_in:
            state.note(m.note)
    state.show_items(_MODELS, matching)


_OTHERS = (
    ("other causal models", "Gemma 3, Phi 3, OLMo 2, Granite, GPT-2, Qwen2-MoE", "transformers"),
    ("capped attention or logits", "Gemma 2", "refused: the cap is out of our sight"),
    ("other linear attention, state space", "Qwen3-Next, Mamba", "refused: no keys and values"),
)


@model.command("families")
@pass_state
def families(state: State) -> None:
    """List the kinds of models that a server of ours runs, and how."""
    from tinkex.engine.model.families import FAMILIES

    rows = [(family.arch, family.says, "natively") for family in FAMILIES.values()]
    items = [dict(zip(("type", "such_as", "runs"), row, strict=True)) for row in (*rows, *_OTHERS)]
    state.show(_FAMILIES.table(items, title="Model families"), {"families": items})


@model.command()
@click.argument("name", shell_complete=complete_model)
@pass_state
def path(state: State, name: str) -> None:
    """Print the folder of base model NAME on this machine, for other programs."""
    from tinkex.engine.model.base_model import resolve
    from tinkex.errors import ModelNotFoundError

    try:
        source = resolve(name, allow_fetch=False)
    except ModelNotFoundError as exc:
        hint = f"If the Hugging Face hub has it, `{program()} pull {name}` fetches it."
        raise click.ClickException(f"{exc} {hint}") from exc
    if source.note:
        state.note(source.note)
    folder = str(source.path.absolute())
    state.show(folder, {"model": name, "path": folder})

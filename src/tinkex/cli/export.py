"""`tinkex export`: take a checkpoint home as a PEFT adapter or a merged model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from tinkex.cli.arguments import path_argument
from tinkex.cli.output import properties, size
from tinkex.cli.state import Leaf, State, pass_state


@click.command(cls=Leaf)
@path_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder to write.",
)
@click.option("--merged", is_flag=True, help="Fold the adapter into the base model.")
@click.option("--base", help="Base model name or folder, when merging with another copy.")
@click.option("--force", is_flag=True, help="Replace the folder.")
@pass_state
def export(
    state: State, path: str, output: Path, merged: bool, base: str | None, force: bool
) -> None:
    """Write checkpoint PATH as a PEFT folder, or with --merged as a Hugging Face model."""
    from tinkex.cli.fetch import fetch_folder, keep_adapter_only, make_room

    if base and not merged:
        raise click.UsageError("--base goes with --merged.")
    if not merged:
        fetch_folder(state, path, output, force=force)
        num_bytes = keep_adapter_only(output)
        _show(state, path, output, num_bytes, {"format": "peft"})
        return
    from tinkex.recipes.merge import merge_adapter

    make_room(output, force=force)
    with tempfile.TemporaryDirectory() as scratch:
        adapter = Path(scratch) / "adapter"
        fetch_folder(state, path, adapter)
        done = merge_adapter(adapter, output, base)
    num_bytes = sum(file.stat().st_size for file in output.iterdir())
    extra = {"format": "merged", "num_merged": done.num_merged, "untied_head": done.untied}
    _show(state, path, output, num_bytes, extra)


def _show(state: State, path: str, output: Path, num_bytes: int, extra: dict[str, Any]) -> None:
    pairs = {name.replace("_", " ").capitalize(): value for name, value in extra.items()}
    state.show(
        properties(
            None, {"Checkpoint": path, "Destination": output, "Size": size(num_bytes), **pairs}
        ),
        {
            "checkpoint_path": path,
            "destination": str(output),
            "file_size_bytes": num_bytes,
            **extra,
        },
    )

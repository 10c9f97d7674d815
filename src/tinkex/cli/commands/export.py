"""`tinkex export`: take a checkpoint home as a PEFT adapter, a merged model or a GGUF file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.arguments import run_or_path_argument
from tinkex.cli.messages import program
from tinkex.cli.names import resolve_checkpoint
from tinkex.cli.output import properties, size
from tinkex.cli.state import Leaf, State, pass_state

if TYPE_CHECKING:
    from tinkex.export.gguf import NumberType


@click.command(cls=Leaf)
@run_or_path_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder to write; for GGUF a file that ends in .gguf.",
)
@click.option(
    "--to",
    "form",
    type=click.Choice(["peft", "stacked", "merged", "gguf"]),
    default="peft",
    show_default=True,
    help="Adapter alone, the same with experts in 3-D tensors (w1, w2, w3), a whole Hugging Face "
    "model, or one file for llama.cpp.",
)
@click.option(
    "--type",
    "number_type",
    type=click.Choice(["f32", "f16", "q8_0"]),
    help="How GGUF stores matrices.  [default: f16]",
)
@click.option("--base", help="Base model name or folder, when merging with another copy.")
@click.option("--any-base", is_flag=True, help="Merge even if trained on other base weights.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@pass_state
def export(
    state: State,
    path: str,
    output: Path,
    form: str,
    number_type: NumberType | None,
    base: str | None,
    any_base: bool,
    force: bool,
) -> None:
    """Write checkpoint PATH as a PEFT folder, a merged Hugging Face model or a GGUF file."""
    from tinkex.cli.downloads import check_room, fetch_folder, keep_adapter_only

    path = resolve_checkpoint(state, path)
    _check_usage(output, form, number_type, base or ("--any-base" if any_base else None))
    check_room(output, force=force)
    facts: dict[str, Any] = {"format": form}
    if form == "peft":  # in place, so that a broken download goes on when this is called again
        fetch_folder(state, path, output, force=force)
        keep_adapter_only(output)
    else:
        facts |= _converted(state, path, output, form, base, any_base, number_type or "f16")
    if form in ("peft", "stacked"):
        facts["base"] = _named_base(state, output)
    files = list(output.iterdir()) if output.is_dir() else [output]
    num_bytes = sum(file.stat().st_size for file in files)
    shown = {name.replace("_", " ").capitalize(): value for name, value in facts.items()}
    state.show(
        properties(
            None, {"Checkpoint": path, "Destination": output, "Size": size(num_bytes), **shown}
        ),
        {
            "checkpoint_path": path,
            "destination": str(output),
            "file_size_bytes": num_bytes,
            **facts,
        },
    )


def _named_base(state: State, adapter: Path) -> str | None:
    """The folder of the adapter's base on this machine, which the adapter names from now on."""
    from tinkex.export.adapter_base import name_base

    folder = name_base(adapter)
    if folder is None:
        state.note(
            "The base model of this adapter is not on this machine: programs that load the adapter "
            f"must find it by its name. Fetch it with `{program()} pull MODEL`."
        )
    return None if folder is None else str(folder)


def _check_usage(output: Path, form: str, number_type: str | None, base: str | None) -> None:
    if base and form in ("peft", "stacked"):
        raise click.UsageError("--base and --any-base go with --to merged or --to gguf.")
    if number_type and form != "gguf":
        raise click.UsageError("--type goes with --to gguf.")
    if (form == "gguf") != (output.suffix == ".gguf"):
        raise click.UsageError("--to gguf writes a file that ends in .gguf, and nothing else does.")


def _converted(
    state: State,
    path: str,
    output: Path,
    form: str,
    base: str | None,
    any_base: bool,
    number_type: NumberType,
) -> dict[str, Any]:
    """Make what was asked for beside `output`, then move it there: whole or not at all."""
    from tinkex.cli.downloads import fetch_folder, keep_adapter_only, put

    if form == "gguf":
        import gguf  # noqa: F401  # Missing it should be known before the merge, not after.
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".exporting-") as scratch:
        adapter = Path(scratch) / "adapter"
        fetch_folder(state, path, adapter)
        if form == "stacked":
            from tinkex.export.stacked_experts import stack_experts

            num_stacks = stack_experts(adapter)
            keep_adapter_only(adapter)
            put(adapter, output)
            return {"num_stacks": num_stacks}
        from tinkex.export.merge import merge_adapter

        merged = merge_adapter(adapter, adapter.with_name("model"), base, any_base=any_base)
        if form == "merged":
            put(merged.folder, output)
            return {"num_merged": merged.num_merged, "untied_head": merged.untied}
        from tinkex.export.gguf import write_gguf

        file = adapter.with_name("model.gguf")
        put(write_gguf(merged.folder, file, number_type=number_type, name=output.stem).file, output)
        return {"number_type": number_type, "untied_head": merged.untied}

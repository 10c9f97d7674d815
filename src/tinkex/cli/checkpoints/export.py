"""`tinkex export`: take a checkpoint home as a PEFT adapter, a merged model or a GGUF file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.arguments import run_or_path_argument
from tinkex.cli.output import properties, size
from tinkex.cli.state import Leaf, State, pass_state

if TYPE_CHECKING:
    from tinkex.recipes.gguf import NumberType


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
    from tinkex.cli.checkpoints.fetch import check_room, fetch_folder, keep_adapter_only

    _check_usage(output, form, number_type, base or ("--any-base" if any_base else None))
    check_room(output, force=force)
    if form == "peft":
        fetch_folder(state, path, output, force=force)
        _show(state, path, output, keep_adapter_only(output), {"format": form})
        return
    if form == "stacked":
        from tinkex.cli.checkpoints.fetch import put
        from tinkex.recipes.stack import stack_experts

        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".exporting-") as scratch:
            adapter = Path(scratch) / "adapter"
            fetch_folder(state, path, adapter)
            extra = {"num_stacks": stack_experts(adapter)}
            num_bytes = keep_adapter_only(adapter)
            put(adapter, output)
        _show(state, path, output, num_bytes, {"format": form, **extra})
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".exporting-") as scratch:
        adapter = Path(scratch) / "adapter"
        fetch_folder(state, path, adapter)
        if form == "merged":
            extra = _merged(adapter, output, base, any_base)
        else:
            extra = _gguf(adapter, output, base, any_base, number_type or "f16")
    files = list(output.iterdir()) if output.is_dir() else [output]
    num_bytes = sum(file.stat().st_size for file in files)
    _show(state, path, output, num_bytes, {"format": form, **extra})


def _check_usage(output: Path, form: str, number_type: str | None, base: str | None) -> None:
    if base and form in ("peft", "stacked"):
        raise click.UsageError("--base and --any-base go with --to merged or --to gguf.")
    if number_type and form != "gguf":
        raise click.UsageError("--type goes with --to gguf.")
    if (form == "gguf") != (output.suffix == ".gguf"):
        raise click.UsageError("--to gguf writes a file that ends in .gguf, and nothing else does.")


def _merged(adapter: Path, output: Path, base: str | None, any_base: bool) -> dict[str, Any]:
    from tinkex.cli.checkpoints.fetch import put
    from tinkex.recipes.merge import merge_adapter

    done = merge_adapter(adapter, adapter.with_name("model"), base, any_base=any_base)
    put(done.folder, output)
    return {"num_merged": done.num_merged, "untied_head": done.untied}


def _gguf(
    adapter: Path, output: Path, base: str | None, any_base: bool, number_type: NumberType
) -> dict[str, Any]:
    import gguf  # noqa: F401  # Missing it should be known before the merge, not after.

    from tinkex.cli.checkpoints.fetch import put
    from tinkex.recipes.gguf import write_gguf
    from tinkex.recipes.merge import merge_adapter

    merged = merge_adapter(adapter, adapter.with_name("model"), base, any_base=any_base)
    name = output.stem
    done = write_gguf(
        merged.folder, adapter.with_name("model.gguf"), number_type=number_type, name=name
    )
    put(done.file, output)
    return {"number_type": number_type, "untied_head": merged.untied}


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

"""`tinkex pull`: fetch a base model once, and say what it needs before it is loaded.

`prepare` does the same for commands that are about to use a model on this machine. Sizes come from
the headers of the files, so no server is started and no weight is read for them.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.completions import complete_model
from tinkex.cli.names import near_names
from tinkex.cli.output import properties, size
from tinkex.cli.state import Leaf, State, pass_state
from tinkex.errors import ModelNotFoundError, TinkerError

if TYPE_CHECKING:
    from tinkex.engine.model.base_model import ModelSource

_CPU_BYTES = 4
"""A weight on a CPU is a float32; on a GPU it is a bfloat16, half of that."""


@click.command(cls=Leaf)
@click.argument("model", shell_complete=complete_model)
@pass_state
def pull(state: State, model: str) -> None:
    """Fetch MODEL from the Hugging Face hub, once, and show what it needs."""
    source = _fetch(model)
    needs = need_of(source)
    state.show(
        properties(
            None,
            {
                "Model": model,
                "Folder": source.path,
                "On disk": size(needs.disk_bytes),
                "Parameters": f"{needs.parameters / 1e6:.0f} million",
                "Memory": needs.words(),
                **({"Note": source.note} if source.note else {}),
            },
        ),
        {
            "model": model,
            "folder": str(source.path),
            "disk_bytes": needs.disk_bytes,
            "parameters": needs.parameters,
            "memory_bytes": needs.memory_bytes,
            "free_bytes": needs.free_bytes,
            "fits": needs.fits,
            "note": source.note or None,
        },
    )
    if not needs.fits:
        state.note("It does not fit into the memory of this machine's CPU.")


def prepare(state: State, model: str) -> None:
    """Before a server on this machine loads a base model: fetch it in sight, and say its size."""
    from tinkex.client.config import LOCAL, ClientConfig
    from tinkex.types.account.checkpoints import is_tinker_path

    if is_tinker_path(model):
        return
    if ClientConfig.from_env(base_url=state.base_url).base_url != LOCAL:
        return
    if os.environ.get("TINKEX_LOCAL_ENGINE"):
        return  # a toy has no weights
    source = fetch(model, state)
    if source.stands_in:
        state.note(f"Note: {source.note}")
    state.note(f"{model}: {need_of(source).words()}.")


def fetch(model: str, state: State) -> ModelSource:
    """The files of a base model. The error for an unknown name has near runs: it may be one's."""
    try:
        return _fetch(model)
    except ModelNotFoundError as exc:
        near = near_names(state, model)
        raise ModelNotFoundError(f"{exc} No run is called that either.{near}") from exc


def _fetch(model: str) -> ModelSource:
    """The model's files, fetched with a bar when they are not here."""
    from tinkex.engine.model.base_model import resolve

    try:
        source = resolve(model, allow_fetch=False)
    except ModelNotFoundError:
        source = None
    if source is None or source.stands_in:  # the hub may have what another stands in for
        click.echo(f"Fetching {model} ...", err=True)
        source = resolve(model)
    return source


@dataclass(frozen=True, slots=True)
class Need:
    """Disk and memory that a model takes, beside what this machine has free."""

    parameters: int
    disk_bytes: int
    free_bytes: int | None
    whole_bytes: tuple[int, int] | None = None
    """For one user who trains and samples, on a CPU and on a GPU (docs/does-it-fit.md); None for
    models that run through transformers, whose weights alone are known."""

    @property
    def memory_bytes(self) -> int:
        return self.whole_bytes[0] if self.whole_bytes else self.parameters * _CPU_BYTES

    @property
    def fits(self) -> bool:
        return self.free_bytes is None or self.memory_bytes <= self.free_bytes

    def words(self) -> str:
        if self.whole_bytes:
            cpu, gpu = map(size, self.whole_bytes)
            needed = f"needs about {cpu} on a CPU, {gpu} on a GPU, to train and sample"
        else:
            needed = f"needs {size(self.memory_bytes)} on a CPU for its weights alone"
        if self.free_bytes is None:
            return needed
        return f"{needed}; {size(self.free_bytes)} of memory are free"


def need_of(source: ModelSource) -> Need:
    if source.is_gguf:
        from tinkex.engine.model.gguf import GgufFile

        shapes = [list(tensor.shape) for tensor in GgufFile(source.path).tensors.values()]
        files = [source.path]
    else:
        files = sorted(source.path.glob("*.safetensors"))
        shapes = [shape for file in files for shape in _shapes(file)]
    disk_bytes = sum(file.stat().st_size for file in files)
    parameters = sum(math.prod(shape) for shape in shapes)
    return Need(parameters, disk_bytes, _free_bytes(), _whole_bytes(source))


def _whole_bytes(source: ModelSource) -> tuple[int, int] | None:
    """Weights, adapter with its optimizer, one row and samples, by the engine's own sums."""
    try:
        import torch

        from tinkex.engine.torch.survey import needs

        config = source.config()
    except (ImportError, TinkerError, OSError, ValueError):
        return None  # no torch here, or a model that loading will refuse in its own words
    if not config.native:
        return None
    return needs(config, torch.float32).total, needs(config, torch.bfloat16).total


def _shapes(file: Path) -> list[list[int]]:
    """The shapes of all tensors, from the header of a safetensors file."""
    with file.open("rb") as stream:
        # Eight bytes of length, then a JSON header (the safetensors format); a damaged length must
        # not ask for all memory.
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, 100_000_000)))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


def _free_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return int(available[0]) << 10 if available else None  # The kernel counts in KiB.
    except OSError:
        return None

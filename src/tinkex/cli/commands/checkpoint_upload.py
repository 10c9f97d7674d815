"""`tinkex checkpoint upload`: the files of an adapter become a checkpoint, as SDK 0.39 does it.

Works with every server that takes such uploads. `tinkex import` needs a Tinkex server and takes
whatever `peft` writes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import properties, size
from tinkex.cli.state import Leaf, State, pass_state

if TYPE_CHECKING:
    from tinkex.types import LoraConfig

_CONFIG = "adapter_config.json"
_TRIES = 3


@click.command(cls=Leaf)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--base-model", help="The server's name of the base model, where it differs.")
@click.option("--project", help="Put the checkpoint into this project.")
@pass_state
def upload(state: State, folder: Path, base_model: str | None, project: str | None) -> None:
    """Upload the adapter in FOLDER, in the form that save_weights_external writes."""
    config = _config(folder)
    base = base_model or config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise click.ClickException(f"{folder / _CONFIG} names no base model; give --base-model.")
    with state.rest() as rest:
        started = rest.external_weights_upload_start(base, _lora(config), project).result()
        files = {name: folder / name for name in started.urls}
        if absent := [name for name, file in files.items() if not file.is_file()]:
            raise click.ClickException(f"{folder} holds no {', '.join(absent)}.")
        for name, url in started.urls.items():
            state.note(f"{name}: {size(files[name].stat().st_size)}")
            _put(url, files[name])
        path = rest.external_weights_upload_finish(started.upload_id).result().tinker_path
    num_bytes = sum(file.stat().st_size for file in files.values())
    state.show(
        properties(None, {"Checkpoint": path, "Base Model": base, "Size": size(num_bytes)}),
        {"tinker_path": path, "base_model": base, "size_bytes": num_bytes},
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        if not isinstance(config, dict) or not isinstance(config.get("r"), int):
            raise ValueError("it has no rank r")
    except (OSError, ValueError) as exc:
        raise click.ClickException(
            f"{folder} holds no {_CONFIG} of a LoRA adapter: {exc}."
        ) from exc
    return config


def _lora(config: dict[str, Any]) -> LoraConfig:
    """The shape of the adapter; which layers it has is told by its files."""
    from tinkex.types import LoraConfig

    return LoraConfig(rank=config["r"])


def _put(url: str, file: Path) -> None:
    """Send a file; a repeat after a lost answer is told that it is there already."""
    import httpx

    from tinkex.cli.address import detail_of
    from tinkex.wire.loopback import DIRECT

    timeout = httpx.Timeout(60, write=600, read=600)
    for attempt in range(1, _TRIES + 1):
        try:
            with httpx.Client(timeout=timeout, mounts=DIRECT) as client, file.open("rb") as body:
                length = {"Content-Length": str(file.stat().st_size)}
                answer = client.put(url, content=body, headers=length)
        except httpx.TransportError as exc:
            if attempt == _TRIES:
                raise click.ClickException(f"Could not send {file.name}: {exc!r}") from exc
            continue
        if answer.is_success or (answer.status_code == 409 and _digest(file) in answer.text):
            return
        raise click.ClickException(f"{file.name} was refused: {detail_of(answer)}")


def _digest(file: Path) -> str:
    with file.open("rb") as body:
        return hashlib.file_digest(body, "sha256").hexdigest()

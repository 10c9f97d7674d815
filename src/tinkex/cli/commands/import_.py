"""`tinkex import`: a PEFT adapter from anywhere becomes a tinker:// checkpoint to train on."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import click

from tinkex.cli.address import detail_of, resolve_address, send
from tinkex.cli.output import properties, size
from tinkex.cli.state import Leaf, State, pass_state

_NEEDED = "adapter_config.json"
_SKIPPED = (".md", ".gitattributes")


@click.command("import", cls=Leaf)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", default="imported", show_default=True, help="Name of the checkpoint.")
@click.option("--base-model", help="The server's name of the base model, where it differs.")
@pass_state
def import_(state: State, folder: Path, name: str, base_model: str | None) -> None:
    """Upload the PEFT adapter in FOLDER. Tinkex servers only: it is an extension."""
    if not (folder / _NEEDED).is_file():
        raise click.ClickException(f"{folder} holds no {_NEEDED}; is it a PEFT adapter?")
    from tinkex.export.adapter_base import trained_on

    # An adapter that we exported names the folder of its base; the server has a name for it.
    base_model = base_model or trained_on(folder)
    answer = _upload(state, _tar(folder), {"name": name, "base_model": base_model})
    path = answer["tinker_path"]
    state.show(
        properties(
            None,
            {
                "Checkpoint": path,
                "Base Model": answer["base_model"],
                "Size": size(answer["size_bytes"]),
            },
        ),
        answer,
    )
    state.note(f"Train on: service.create_training_client_from_state({path!r})")


def _tar(folder: Path) -> bytes:
    out = io.BytesIO()
    # Links as files: a folder of the Hugging Face cache is nothing but links.
    with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
        for file in sorted(folder.iterdir()):
            if file.is_file() and not file.name.startswith(".") and file.suffix not in _SKIPPED:
                archive.add(file, arcname=file.name)
    return out.getvalue()


def _upload(state: State, body: bytes, query: dict[str, str | None]) -> dict[str, Any]:
    with resolve_address(state) as (base_url, api_key):
        answer = send(
            "POST",
            base_url,
            "/api/v1/checkpoints/import",
            api_key,
            params={key: value for key, value in query.items() if value},
            content=body,
            headers={"Content-Type": "application/x-tar"},
            timeout=600,
        )
    if answer.status_code in (404, 405):
        raise click.ClickException(f"{base_url} cannot import adapters; a Tinkex server can.")
    if answer.is_error:
        raise click.ClickException(detail_of(answer))
    return dict(answer.json())

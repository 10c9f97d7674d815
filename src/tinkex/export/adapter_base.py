"""The base model of an exported adapter, named so that other programs find it.

A checkpoint names its base as the server does. `peft` and vLLM read that name as a folder or as a
repository of the hub, and of `tinkex/SmolLM2-135M-Instruct-Q4` the hub knows nothing. Such an
adapter names the folder of this machine instead; the server's name stays in `tinkex.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinkex.engine.folders import CONFIG, MANIFEST
from tinkex.engine.model.base_model import ModelSource, resolve
from tinkex.errors import ModelNotFoundError

__all__ = ["name_base", "trained_on"]


def name_base(adapter: Path) -> Path | None:
    """Let an adapter folder name a base that loads here; gives the folder of the base.

    None: the base is not on this machine, and the adapter goes on naming it as it did.
    """
    config = _read(adapter / CONFIG)
    name = str(config.get("base_model_name_or_path", ""))
    try:
        source = resolve(name, allow_fetch=False)
    except ModelNotFoundError:
        return None
    folder = source.path.absolute()
    if _is_only_here(source):
        _write(adapter / CONFIG, {**config, "base_model_name_or_path": str(folder)})
        manifest = _read(adapter / MANIFEST)
        _write(adapter / MANIFEST, {**manifest, "base_model": name})
    return folder


def trained_on(adapter: Path) -> str | None:
    """The server's name of the base of an adapter that was exported by us."""
    name = _read(adapter / MANIFEST).get("base_model")
    return name if isinstance(name, str) and name else None


def _is_only_here(source: ModelSource) -> bool:
    """Whether a hub could not give these weights under their name."""
    return source.stands_in or source.name.startswith("tinkex/") or Path(source.name).exists()


def _read(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

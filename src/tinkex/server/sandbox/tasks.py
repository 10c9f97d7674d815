"""The jobs that the helper process knows, by name: plain functions of facts and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from tinkex.chat.template import render
from tinkex.server.files.adapter_archive import inspect, unpack

Task = Callable[[Mapping[str, Any], Any], Any]
"""Facts of the job and its bytes, a stream that is read forwards; gives what JSON can hold."""


def _unpack_adapter(facts: Mapping[str, Any], payload: Any) -> dict[str, Any]:
    config, claims = unpack(cast(BinaryIO, payload), facts["size"], Path(facts["folder"]))
    return {"config": config, "claims": claims}


def _inspect_adapter(facts: Mapping[str, Any], payload: Any) -> dict[str, Any]:
    config, claims = inspect(Path(facts["folder"]))
    return {"config": config, "claims": claims}


def _render(facts: Mapping[str, Any], payload: Any) -> str:
    return render(**facts)


TASKS: Mapping[str, Task] = {
    "unpack_adapter": _unpack_adapter,
    "inspect_adapter": _inspect_adapter,
    "render": _render,
}

"""Every public name and signature of the official SDK exists here; ours only adds (contract 13)."""

from __future__ import annotations

import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from public_surface import CLASSES, surface
from test_same_as_official import _sdk_python

import tinkex

# Not meant for users: both are made by other clients.
INTERNAL = {("SamplingClient", "__init__"), ("LossHandle", "__init__")}


@pytest.mark.peers
@pytest.mark.timeout(1800)
def test_ours_accepts_every_call_the_official_sdk_accepts() -> None:
    script = Path(__file__).parent / "public_surface.py"
    python = str(_sdk_python("0.36.0"))
    done = subprocess.run(
        [python, str(script), "tinker"], capture_output=True, text=True, timeout=120, check=True
    )
    official, ours = json.loads(done.stdout), surface(tinkex)
    assert set(official["names"]) <= set(ours["names"])
    problems = []
    for owner, methods in official["classes"].items():
        for name, theirs in methods.items():
            mine = ours["classes"][owner].get(name)
            if mine is None:
                problems.append(f"{owner}.{name} is missing")
            elif (owner, name) not in INTERNAL and not _accepts(mine, theirs):
                problems.append(f"{owner}.{name}: {mine} does not take {theirs}")
    assert problems == []


def _accepts(mine: list[list[Any]], theirs: list[list[Any]]) -> bool:
    """Same names, order, kinds and defaults; a parameter of ours alone has a default."""
    known = {name: (kind, default) for name, kind, default in mine}
    for name, kind, default in theirs:
        have = known.get(name)
        if have is None or have[0] != kind or (default is not None and have[1] != default):
            return False
    order = [name for name, _, _ in mine if name in {t[0] for t in theirs}]
    extra = [p for p in mine if p[0] not in {t[0] for t in theirs}]
    return order == [t[0] for t in theirs] and all(default is not None for _, _, default in extra)


@pytest.mark.parametrize("owner", CLASSES)
def test_every_public_method_says_what_it_does(owner: str) -> None:
    """An `_async` twin of a one-line method may rely on its sync sister."""
    undocumented = []
    for name, value in vars(getattr(tinkex, owner)).items():
        function = getattr(value, "__func__", value)
        if name.startswith("_") or not inspect.isfunction(function) or name.endswith("_async"):
            continue
        if not inspect.getdoc(function) and name not in ("get_telemetry", "future"):
            undocumented.append(name)
    assert undocumented == []


def test_each_waiting_call_has_an_async_twin() -> None:
    for owner in (tinkex.ServiceClient, tinkex.TrainingClient, tinkex.SamplingClient):
        sync = {n for n in vars(owner) if not n.startswith("_")}
        for name in sync:
            if name.endswith("_async"):
                assert name.removesuffix("_async") in sync, name
                assert inspect.iscoroutinefunction(vars(owner)[name]), name

"""Every public name and signature of the official SDK exists here; ours only adds (contract 13)."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from public_surface import CLASSES, surface
from test_same_as_official import _sdk_python

import tinkex

# Not meant for users: these are made by other clients.
INTERNAL = {("SamplingClient", "__init__"), ("LossHandle", "__init__")}
INTERNAL_SINCE_0_38 = {("TrainingClient", "__init__")}  # it needs what the SDK asked for already


# Futures that are used as clients: one class here, which `tinkex.compat` gives these names.
COMPAT = {"BackcompatSamplingClientFuture", "BackcompatTrainingClientFuture"}


@pytest.mark.peers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["0.36.0", "0.38.0"])
def test_ours_accepts_every_call_the_official_sdk_accepts(version: str) -> None:
    script = Path(__file__).parent / "public_surface.py"
    python = str(_sdk_python(version))
    done = subprocess.run(
        [python, str(script), "tinker"], capture_output=True, text=True, timeout=500, check=True
    )
    official, ours = json.loads(done.stdout), surface(tinkex)
    internal = INTERNAL | (INTERNAL_SINCE_0_38 if version == "0.38.0" else set())
    assert set(official["names"]) - COMPAT <= set(ours["names"])
    problems = []
    for owner, methods in official["classes"].items():
        for name, theirs in methods.items():
            mine = ours["classes"][owner].get(name)
            if mine is None:
                problems.append(f"{owner}.{name} is missing")
            elif (owner, name) not in internal and not _accepts(mine, theirs):
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


# What touches no server, and what is iterated instead of awaited.
WITHOUT_TWIN = frozenset(
    """close create from_sampler_handle get_console_url get_sampler_handle get_telemetry
    iter_training_runs iter_user_checkpoints on_queue_state_change
    save_weights_and_get_sampling_client_sync stream stream_body""".split()
)


def test_each_call_has_an_async_twin_and_each_twin_a_call() -> None:
    for owner in ("Service", "Training", "Sampling", "Rest", "Admin", "RecoveringTraining"):
        client = getattr(tinkex, f"{owner}Client")
        calls = {
            name: inspect.getattr_static(client, name)
            for name in dir(client)
            if not name.startswith("_") and callable(getattr(client, name))
        }
        for name, value in calls.items():
            if name.endswith("_async"):
                assert name.removesuffix("_async") in calls, name
                assert asyncio.iscoroutinefunction(value), name
                assert value.__name__ == name
                assert value.__doc__
            elif name not in WITHOUT_TWIN:
                assert f"{name}_async" in calls, f"{client.__name__}.{name}"

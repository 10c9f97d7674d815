"""Every public name of the official SDKs is here or accounted for (R6, R34)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"contracts_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


parity = load("parity")
NAMES = parity.names()


def test_the_page_says_how_each_name_stands_today():
    """Fails when a name is missing, undocumented, or planned although it exists."""
    hint = "run: python tests/contracts/parity.py --write"
    assert parity.page_table() == parity.table(), hint


def test_every_type_is_here():
    """R6: all 66+ types of 0.4.1 and every type of 0.36."""
    types = [item for item in NAMES if item.scope == "tinker.types"]
    assert len([item for item in types if "0.4.1" in item.sdks]) >= 66
    assert [item.name for item in types if item.state != "yes"] == []


def test_every_field_and_method_of_every_type_is_here():
    assert parity.missing_members() == []


def test_generic_event_is_here_although_the_sdk_hides_it():
    """R6."""
    from tinkex.types import GenericEvent

    assert "event_name" in GenericEvent.model_fields


def test_a_reason_is_given_only_for_names_that_are_missing():
    missing = {(item.scope, item.name) for item in NAMES if item.state != "yes"}
    assert set(parity.NOT_KEPT) <= missing


OFFICIAL_TESTS = (HERE.parent / "golden" / "official-tests.txt").read_text().split()


@pytest.mark.parametrize("path", OFFICIAL_TESTS)
def test_every_official_test_file_has_a_counterpart_or_a_reason(path):
    """R34: its row names tests that exist, or says why there are none."""
    row = next((li for li in parity.PAGE.read_text().splitlines() if f"| `{path}` |" in li), None)
    assert row is not None, f"{path} has no row in docs/parity.md"
    _, _, state, counterpart, _ = (cell.strip() for cell in row.split("|"))
    assert state in ("mirrored", "adapted", "not needed")
    ours = re.findall(r"`(tests/[^`]+)`", counterpart)
    assert [p for p in ours if not (parity.ROOT / p).exists()] == []
    assert ours or state == "not needed"


def test_importing_tinkex_loads_nothing_heavy():
    """The bare import is the promise of a fast command line."""
    code = "import sys, tinkex, tinkex.types; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    modules = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert modules & {"torch", "numpy", "pydantic", "httpx", "google", "fastapi"} == set()


def test_the_hot_types_load_without_pydantic_or_torch():
    code = "import sys, tinkex; tinkex.Datum; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    modules = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert "numpy" in modules
    assert modules & {"torch", "pydantic", "httpx"} == set()


def test_a_client_loads_only_the_messages_it_begins_with():
    """Each message is a class that pydantic builds: all of them together are a third of a start."""
    code = "import sys, tinkex; tinkex.ServiceClient, tinkex.AdamParams; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    messages = {name for name in loaded.stdout.split() if name.startswith("tinkex.types.")}
    later = {"account.administration", "account.billing", "service.telemetry"}
    later |= {"service.extensions", "service.session_search", "training.models", "training.weights"}
    assert "tinkex.types.service.futures" in messages
    assert messages & {f"tinkex.types.{name}" for name in later} == set()


def test_every_type_says_what_it_is():
    """Type aliases cannot carry a docstring; classes must."""
    from tinkex import types

    classes = [value for n in types.__all__ if isinstance(value := getattr(types, n), type)]
    own = [cls for cls in classes if cls.__module__.startswith("tinkex.")]
    assert [cls.__name__ for cls in own if not cls.__dict__.get("__doc__")] == []

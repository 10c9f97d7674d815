"""R32: the same program gives the same numbers with the official SDK and with ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCENARIO = HERE / "same_scenario.py"


def _sdk_python(version: str) -> Path:
    spec = importlib.util.spec_from_file_location("peer_venvs", HERE.parent / "peers" / "venvs.py")
    assert spec is not None
    assert spec.loader is not None
    venvs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(venvs)
    python: Path = venvs.sdk_python(version)
    return python


def _numbers(python: Path | str, module: str, base_url: str, **env: str) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    done = subprocess.run(
        [str(python), str(SCENARIO), module, base_url],
        env={**clean, "TINKER_TELEMETRY": "0", **env},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


@pytest.fixture(scope="module")
def official(toy_server: str) -> dict[str, Any]:
    return _numbers(_sdk_python("0.36.0"), "tinker", toy_server)


@pytest.mark.peers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extensions", ["1", "0"])
def test_losses_logprobs_tokens_and_checkpoints_are_equal(
    official: dict[str, Any], toy_server: str, extensions: str
) -> None:
    """With the extensions of our server and in the plain contract."""
    ours = _numbers(sys.executable, "tinkex", toy_server, TINKEX_CLIENT_EXTENSIONS=extensions)
    assert set(ours) == set(official)
    for name in official:
        assert ours[name] == official[name], name


@pytest.mark.timeout(1200)
def test_the_official_afternoon_runs_unchanged_on_ours(toy_server: str) -> None:
    """Every step of the peers' scenario, written against `import tinker`, passes on this SDK."""
    script = HERE.parent / "peers" / "scenario.py"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    done = subprocess.run(
        [sys.executable, "-m", "tinkex.compat", str(script)],
        env={**clean, "TINKER_BASE_URL": toy_server, "TINKER_API_KEY": "tml-afternoon"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(steps) > 20, done.stderr[-3000:]
    # The command line is another program; it has tests of its own.
    assert [s for s in steps if s["outcome"] != "ok" and s["step"] != "command_line"] == []
    assert done.returncode == 0

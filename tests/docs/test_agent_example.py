"""`examples/agent_rl.py` learns: an agent that only knows the openai client, trained by RL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "agent_rl.py"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_agent_learns_on_its_own_tokens(
    start_server, default_model_dir: Path, tmp_path: Path
) -> None:
    """The script itself asserts that the reward rises and that every importance ratio is 1."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    alias = f"HuggingFaceTB/SmolLM2-135M-Instruct={default_model_dir}"
    with start_server(tmp_path, "--model", str(default_model_dir), "--alias", alias) as base_url:
        command = [sys.executable, str(EXAMPLE), base_url]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the last three" in done.stdout

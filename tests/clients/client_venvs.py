"""Virtual environments that hold foreign clients, made on demand and kept outside the tree."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
PACKAGES = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm", "mcp"),  # without mcp its completion() cannot take tools
    "langchain": ("langchain-openai",),
    "inspect": ("inspect-ai", "openai"),
    "lm-eval": ("lm-eval[api]", "transformers"),
}


def client_python(name: str) -> Path:
    """The interpreter of the environment that holds a client; builds it when absent."""
    home = Path(os.environ.get("TINKEX_CLIENTS_DIR", Path.home() / ".cache" / "tinkex-clients"))
    home.mkdir(parents=True, exist_ok=True)
    home = (
        home.resolve()
    )  # in a test `~/.cache` is a link, and a venv keeps the path it was made at
    folder = home / name
    stamp = folder / ".complete"
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = " ".join(PACKAGES[name])
        if not stamp.exists() or stamp.read_text() != wanted:
            _run([sys.executable, "-m", "venv", str(folder)])
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
            _run([*pip, "-c", str(CONSTRAINTS), *PACKAGES[name]])
            stamp.write_text(wanted)
    return folder / "bin" / "python"


def _run(command: list[str]) -> None:
    """Three times at most: a package index may be away for a moment."""
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")

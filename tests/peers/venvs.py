"""Virtual environments that hold one official SDK each, made on demand and kept outside the tree.

A venv lies in `$TINKEX_PEERS_DIR` (default `~/.cache/tinkex-peers`), one folder per SDK version,
and is complete when its stamp file exists. A lock file per version lets several test processes ask
at once; a half-built venv is completed, never removed, since another process may use it. This
module does not know what the SDKs do; `python venvs.py VERSION ...` builds ahead.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SDK_VERSIONS = ("0.4.1", "0.10.0", "0.16.1", "0.22.7", "0.25.0", "0.36.0")
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
BUILD_TIMEOUT_S = 1500
# The oldest SDK imports both without naming torch; the newer ones need torch for tensors only.
FIRST = ("torch==2.13.0", "numpy")


def peers_dir() -> Path:
    # Resolved: in a test `~/.cache` is a link, and a venv keeps the path it was made at.
    folder = os.environ.get("TINKEX_PEERS_DIR", Path.home() / ".cache" / "tinkex-peers")
    return Path(folder).resolve()


def sdk_python(version: str) -> Path:
    """The interpreter of the venv that holds the official SDK `version`; builds it when absent."""
    folder = peers_dir() / version
    stamp = folder / ".complete"
    with _locked(version):
        if not stamp.exists():
            _build(folder, version)
            stamp.write_text(version)
    return folder / "bin" / "python"


@contextmanager
def _locked(version: str) -> Iterator[None]:
    with open(f"/tmp/tinkex-peers-{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, version: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS)]
    _run([*pip, *FIRST])
    _run([*pip, f"tinker=={version}"])


def _run(command: list[str]) -> None:
    """Three times at most: a package index may be away for a moment."""
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or SDK_VERSIONS:
        print(wanted, sdk_python(wanted), flush=True)

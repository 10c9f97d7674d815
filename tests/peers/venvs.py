"""Environments that hold one official SDK each (`tests/harness/cached_venv.py` says where).

This module does not know what the SDKs do; `python venvs.py VERSION ...` builds ahead.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
from cached_venv import cached_python

SDK_VERSIONS = ("0.4.1", "0.10.0", "0.16.1", "0.22.7", "0.25.0", "0.36.0", "0.38.0")


def sdk_python(version: str) -> Path:
    """The interpreter of the venv that holds the official SDK `version`; builds it when absent."""
    # The oldest SDK imports both without naming them; the newer ones need torch for tensors only.
    return cached_python(f"sdk-{version}", ("torch", "numpy", f"tinker=={version}"))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or SDK_VERSIONS:
        print(wanted, sdk_python(wanted), flush=True)

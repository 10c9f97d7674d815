"""The command line. `main` is what the `tinkex` script calls."""

from __future__ import annotations

from tinkex.cli.app import main

__all__ = ["main"]

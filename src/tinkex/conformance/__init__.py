"""The wire contract as a suite that runs against any Tinker-compatible server."""

from __future__ import annotations

from tinkex.conformance.suite import CheckResult, run_suite

__all__ = ["CheckResult", "run_suite"]

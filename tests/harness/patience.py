"""How a test waits for what comes a moment later, on a machine that may be busy.

Ask until it is so, never sleep and hope. The deadline is long because only a failure spends it:
a quiet machine is done with the first questions, a crowded one may take a hundred times as long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 200.0
"""Longer than any machine takes for what is right, and shorter than the limit of a test."""


def until(is_so: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """Wait until `is_so()` is true; `told()` is what a failure shows."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {PATIENCE_S:g} s {told()}"
        time.sleep(0.02)


async def soon(is_so: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """`until` for a coroutine: the loop goes on meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {PATIENCE_S:g} s {told()}"
        await asyncio.sleep(0.01)

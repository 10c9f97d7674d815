"""Keep large work off the event loop, so that a heartbeat never waits behind a big batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LARGE_BYTES = 64 * 1024


async def off_loop(size_bytes: int, work: Callable[..., T], *args: Any) -> T:
    """Run `work` here when it is small, on a thread when it would hold up others."""
    if size_bytes < LARGE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)

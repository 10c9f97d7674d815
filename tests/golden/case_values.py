"""Values that go through every recorded request and result.

Each builder of the cases takes a `types` module - the official one when recording, ours when
testing - so that both build the same value from the same code. The cases import neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

Build = Callable[[Any], Any]
Cases = Iterator[tuple[str, str, Build]]
"""(case, endpoint, builder)"""
TIME = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
UNICODE = 'naïve 東京 🙂 \u2028 " \\ \n'
PNG = bytes(range(256)) * 3

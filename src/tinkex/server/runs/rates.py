"""Rates of each base model on this server, measured on the work that it did: seconds, bytes.

Of every kind of work the amounts and what they took are added up, and halved now and then, so that
the latest work counts most. Kept over restarts. Nothing here says who did the work, and nothing is
said of work that was never done. On the event loop only; the store is asked off it.
"""

from __future__ import annotations

import math

import orjson

from tinkex.store import Store

STATE_BYTES, SAMPLER_BYTES = "bytes of a state", "bytes of a sampler"
"""Work that takes bytes; the rank of the adapter is its amount."""
PREFILL, SAMPLE = "prefill", "sample"
"""Work on samples, in tokens. All other work has the name of its operation, and takes seconds."""
MAX_NOTES = 500
"""Notes after which the sums of a kind of work are halved."""
MAX_MODELS = 256


class MeasuredRates:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._sums: dict[str, dict[str, list[float]]] = {}  # amount, what it took, notes
        self._is_dirty = False

    async def open(self) -> None:
        text = await self._store.call(self._store.rates.read)
        self._sums = orjson.loads(text) if text else {}

    async def flush(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            text = orjson.dumps(self._sums).decode()
            await self._store.call(self._store.rates.write, text)

    def note(self, base_model: str, work: str, amount: float, took: float) -> None:
        """Count work that was done: how much of it, and what it took in seconds or bytes."""
        if not (amount > 0 and took >= 0 and math.isfinite(took)):
            return
        sums = self._sums.pop(base_model, {})
        self._sums[base_model] = sums  # the last one is the newest
        if len(self._sums) > MAX_MODELS:
            del self._sums[next(iter(self._sums))]
        amounts, times, notes = sums.get(work, (0.0, 0.0, 0.0))
        share = 1.0 if notes < MAX_NOTES else 0.5
        sums[work] = [(amounts + amount) * share, (times + took) * share, (notes + 1) * share]
        self._is_dirty = True

    def rate(self, base_model: str, work: str) -> float | None:
        """The seconds or bytes of one unit of a kind of work; None: it was never done here."""
        amount, took, _ = self._sums.get(base_model, {}).get(work, (0.0, 0.0, 0.0))
        return took / amount if amount else None

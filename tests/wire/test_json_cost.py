"""What a parser would build is counted in the bytes, exactly, before it is built."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest

from tinkex.contract.cost import Cost
from tinkex.errors import WireError
from tinkex.wire import budget, json_codec
from tinkex.wire.budget import json_cost

TEXTS = ['"', "\\", '\\"', "{[,:]}", "", "a" * 9, "\\\\", "é", "\n", '\\\\"{', "]"]


def _made(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randint(0, 5 if depth < 6 else 3)
    if kind < 4:
        return [None, 1.5, True, "".join(chance.choices(TEXTS, k=chance.randint(0, 4)))][kind]
    if kind == 4:
        return [_made(chance, depth + 1) for _ in range(chance.randint(0, 4))]
    keys = {chance.choice(TEXTS) for _ in range(chance.randint(0, 4))}
    return {key: _made(chance, depth + 1) for key in keys}


def _walked(value: Any) -> Cost:
    """The slow, obvious way."""
    if not isinstance(value, list | dict):
        return Cost()
    inner = sum(
        (_walked(item) for item in (value.values() if isinstance(value, dict) else value)), Cost()
    )
    return Cost(
        containers=1 + inner.containers,
        keys=(len(value) if isinstance(value, dict) else 0) + inner.keys,
        values=1 + max(len(value) - 1, 0) + inner.values,
        depth=1 + inner.depth,
    )


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1 << 20])
def test_the_counts_are_those_of_the_parsed_value(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_PIECE_BYTES", piece_bytes)
    chance = random.Random(piece_bytes)
    for _ in range(300):
        value = _made(chance)
        for spaces in (None, 1):
            text = json.dumps(value, indent=spaces, ensure_ascii=chance.random() < 0.5)
            raw = text.encode()
            assert json_cost(raw) == _walked(value) + Cost(sent_bytes=len(raw)), text


def test_what_is_not_utf8_is_refused() -> None:
    """Python's own parser would guess, and in UTF-16 a letter may hold the byte of a quote."""
    text = '{"a": [[], []]}'
    for encoding in ("utf-16-le", "utf-16", "utf-32"):
        with pytest.raises(WireError, match="not valid JSON"):
            json_codec.loads(text.encode(encoding) + b"NaN ")
    assert json_codec.loads_object(b'{"a": NaN}')["a"] != 0


@pytest.mark.parametrize(
    "value",
    [[{}] * 40_000, [[[]]] * 30_000, [{"a": 1}] * 30_000, [1.5] * 100_000, ["ab"] * 50_000],
)
def test_what_json_becomes_is_counted_generously(value: Any) -> None:
    raw = json.dumps(value).encode()
    tracemalloc.start()
    parsed = json_codec.loads(raw)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parsed == value
    assert held < budget.parsed_json_bytes(raw, budget.quick_json_cost(raw)) < 20 * held

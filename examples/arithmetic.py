"""A reward for `tinkex train rl examples/arithmetic.py:reward`: sums of two digits, answered bare.

Half a point for answering with a number and nothing else, half for the right one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any


def prompts() -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b}
        for a, b in pairs
    ]


def reward(completion: str, row: Mapping[str, Any]) -> float:
    bare = re.fullmatch(r"\s*(\d{1,3})\.?\s*", completion)
    if bare is None:
        return 0.0
    return 1.0 if int(bare[1]) == row["answer"] else 0.5

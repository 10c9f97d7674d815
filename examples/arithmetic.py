"""A reward for `tinkex train rl examples/arithmetic.py:reward`: sums of two digits, answered bare.

A point for the right number and nothing else, less the further it is off, nothing for words. The
graded part matters: with all or nothing, a small model learns the form and then finds no signal.
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
    return max(0.0, 1 - abs(int(bare[1]) - row["answer"]) / 10) if bare else 0.0

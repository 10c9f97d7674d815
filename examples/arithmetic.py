"""A reward for `tinkex train rl examples/arithmetic.py:reward`: sums of two digits.

A point when the last number of the answer is the sum, nothing otherwise. The form earns nothing:
"12", "5 + 7 = 12." and "The sum is 12" are worth the same, and so are all wrong answers.
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
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == row["answer"])

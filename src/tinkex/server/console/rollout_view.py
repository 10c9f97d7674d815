"""What a page of rollouts shows: groups, colours, a histogram. Plain data in and out.

Answers come as `rollouts.jsonl` has them, from anybody's folder: every field is read with care.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

from tinkex.server.console.source import number_in

Coloring = Literal["logprob", "advantage", "none"]
MAX_GROUPS = 32
MAX_ANSWERS = 256
MAX_TOKENS = 2000
MAX_COLORED = 40_000
"""Tokens of a page with a colour and a hint of their own; answers after them are plain text."""
MAX_TEXT = 20_000
NUM_BARS = 12
_LEVELS = (0.9, 0.5, 0.2, 0.05)
"""Probabilities between the five shades; a token below the last is the strongest."""


def rollout_view(answers: Sequence[dict[str, Any]], color: Coloring) -> dict[str, Any]:
    """`groups` of answers side by side, and the `bars` of a histogram over all of them."""
    rewards, advantages = _numbers(answers, "reward"), _numbers(answers, "advantage")
    largest = max((abs(one) for one in advantages), default=0.0) or 1.0
    groups: dict[Any, list[dict[str, Any]]] = {}
    for one in answers[:MAX_ANSWERS]:
        groups.setdefault(str(one.get("group", 0)), []).append(one)
    shown = list(groups.items())[:MAX_GROUPS]
    listed = [one for _, members in shown for one in members]
    up_to = accumulate(min(len(_list(one.get("pieces"))), MAX_TOKENS) for one in listed)
    plain = {
        id(one)
        for one, size in zip(listed, up_to, strict=True)
        if size > MAX_COLORED and color != "none"
    }
    return {
        "groups": [_group(name, members, color, largest, plain) for name, members in shown],
        "num_answers": len(answers),
        "num_hidden": len(answers) - len(listed),
        "num_plain": len(plain),
        "measure": "reward" if rewards or not advantages else "advantage",
        "mean": _mean(rewards or advantages),
        "bars": bars(rewards or advantages),
    }


def _group(
    name: str,
    members: Sequence[dict[str, Any]],
    color: Coloring,
    largest: float,
    plain: Collection[int],
) -> dict[str, Any]:
    return {
        "number": name,
        "prompt": str(members[0].get("prompt", ""))[:MAX_TEXT],
        "mean": _mean(_numbers(members, "reward")),
        "answers": [
            _answer(one, "none" if id(one) in plain else color, largest) for one in members
        ],
    }


def _answer(one: dict[str, Any], color: Coloring, largest: float) -> dict[str, Any]:
    logprobs = [number_in(value) for value in _list(one.get("logprobs"))]
    known = [value for value in logprobs if value is not None]
    return {
        "reward": number_in(one.get("reward")),
        "advantage": number_in(one.get("advantage")),
        "num_tokens": len(_list(one.get("tokens"))),
        "mean_logprob": _mean(known),
        "snapshot": str(one.get("snapshot", ""))[:200],
        "is_long": len(str(one.get("text", ""))) > 500,
        "spans": _spans(one, logprobs, color, largest),
    }


def _spans(
    one: dict[str, Any], logprobs: Sequence[float | None], color: Coloring, largest: float
) -> list[tuple[str, str, str]]:
    """(text, class, what hovering tells) of each token; of the whole text where that is unknown."""
    pieces = _list(one.get("pieces"))
    if not pieces or color == "none":
        return [(str(one.get("text", ""))[:MAX_TEXT], "", "")]
    whole = number_in(one.get("advantage"))
    each = [number_in(value) for value in _list(one.get("advantages"))]
    spans = []
    for index, piece in enumerate(pieces[:MAX_TOKENS]):
        logprob = logprobs[index] if index < len(logprobs) else None
        advantage = each[index] if index < len(each) else whole
        value = logprob if color == "logprob" else advantage
        shade = _shade(value) if color == "logprob" else _side(value, largest)
        hint = f"logprob {logprob:.3f}" if logprob is not None else ""
        if advantage is not None:
            hint += f"{', ' if hint else ''}advantage {advantage:+.3f}"
        spans.append((str(piece), shade, hint))
    if len(pieces) > MAX_TOKENS:
        spans.append((f" ... and {len(pieces) - MAX_TOKENS} tokens more", "", ""))
    return spans


def _shade(logprob: float | None) -> str:
    if logprob is None:
        return ""
    chance = math.exp(min(logprob, 0.0))
    return f"l{sum(chance < level for level in _LEVELS)}"


def _side(advantage: float | None, largest: float) -> str:
    if advantage is None or advantage == 0:
        return ""
    size = min(int(3 * abs(advantage) / largest), 2) + 1
    return f"{'up' if advantage > 0 else 'down'}{size}"


def bars(values: Sequence[float]) -> list[dict[str, Any]]:
    """A histogram: edges, count and height (0 to 1) of each bar."""
    if not values:
        return []
    low, high = min(values), max(values)
    if low == high:
        return [{"from": low, "to": high, "count": len(values), "height": 1.0}]
    edges = [low + (high - low) * index / NUM_BARS for index in range(NUM_BARS + 1)]
    counts = [0] * NUM_BARS
    for value in values:
        counts[min(int(NUM_BARS * (value - low) / (high - low)), NUM_BARS - 1)] += 1
    top = max(counts)
    return [
        {"from": start, "to": end, "count": count, "height": count / top}
        for (start, end), count in zip(pairwise(edges), counts, strict=True)
    ]


def _numbers(answers: Sequence[dict[str, Any]], name: str) -> list[float]:
    found = (number_in(one.get(name)) for one in answers)
    return [number for number in found if number is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

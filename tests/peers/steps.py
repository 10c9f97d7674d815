"""Steps of a program that runs under a foreign interpreter, each told as one JSON line.

Imports nothing of ours and nothing that is not in Python, since any environment may run it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback


class NotInThisVersion(Exception):
    pass


def main_of(peer: object, steps: tuple[str, ...]) -> int:
    """Run every step in order; a failed step does not stop the later ones."""
    failed = 0
    for name in steps:
        try:
            detail = getattr(peer, name)()
            outcome = "ok"
        except NotInThisVersion as exc:
            outcome, detail = "n/a", str(exc)
        except BaseException as exc:
            outcome, detail = "failed", f"{type(exc).__name__}: {exc}"[:400]
            traceback.print_exc()
            failed += 1
        told(name, outcome, detail or "")
    return 1 if failed else 0


async def main_of_async(peer: object, steps: tuple[str, ...]) -> int:
    """The same for steps that are coroutines, on one event loop."""
    failed = 0
    for name in steps:
        try:
            detail = getattr(peer, name)()
            detail = await detail if inspect.isawaitable(detail) else detail
            told(name, "ok", detail or "")
        except (Exception, asyncio.CancelledError) as exc:
            traceback.print_exc()
            told(name, "failed", f"{type(exc).__name__}: {exc}"[:400])
            failed += 1
    return 1 if failed else 0


def told(name: str, outcome: str, detail: str) -> None:
    print(json.dumps({"step": name, "outcome": outcome, "detail": detail}), flush=True)


def check(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def near(a: float, b: float, tolerance: float, what: str) -> None:
    check(abs(a - b) <= tolerance, f"{what}: {a} and {b} differ by more than {tolerance}")

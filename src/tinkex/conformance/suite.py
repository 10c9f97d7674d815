"""Which checks there are, and how one ends: pass, fail or unsupported.

A check is a function of a `Probe` with a section of the contract and a claim. It ends quietly, or
raises `Mismatch` with what was expected and what came, or `Unsupported` where the server does not
offer the thing at all. Any other exception is a failure that shows itself. One check never stops
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tinkex.conformance.probe import Probe

__all__ = ["Check", "CheckResult", "Mismatch", "Unsupported", "check", "expect", "run_suite"]


class Mismatch(Exception):
    """The server answered something else than the contract says."""

    def __init__(self, expected: str, got: Any) -> None:
        super().__init__(expected, got)
        self.expected = expected
        self.got = got if isinstance(got, str) else repr(got)


class Unsupported(Exception):
    """The server does not have this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    section: str
    claim: str
    run: Callable[[Probe], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    section: str
    claim: str
    status: Literal["pass", "fail", "unsupported"]
    expected: str = ""
    got: str = ""


CHECKS: list[Check] = []


def check(section: str, claim: str) -> Callable[[Callable[[Probe], None]], Callable[[Probe], None]]:
    """Register a check under a section of the contract."""

    def register(run: Callable[[Probe], None]) -> Callable[[Probe], None]:
        CHECKS.append(Check(section=section, claim=claim, run=run))
        return run

    return register


def expect(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise Mismatch(expected, got)


def run_suite(probe: Probe, only: str = "") -> Iterator[CheckResult]:
    """Run every check whose section or claim contains `only`; outcomes come as they are known."""
    for part in ("service", "training", "sampling", "rest"):  # Importing one registers its checks.
        import_module(f"tinkex.conformance.{part}")
    for item in CHECKS:
        if only.lower() in f"{item.section} {item.claim}".lower():
            yield _run(item, probe)


def _run(item: Check, probe: Probe) -> CheckResult:
    def outcome(status: Literal["pass", "fail", "unsupported"], **texts: str) -> CheckResult:
        return CheckResult(section=item.section, claim=item.claim, status=status, **texts)

    try:
        item.run(probe)
    except Unsupported as exc:
        return outcome("unsupported", got=str(exc))
    except Mismatch as exc:
        return outcome("fail", expected=exc.expected, got=exc.got)
    except Exception as exc:
        return outcome(
            "fail", expected="an answer that decodes", got=f"{type(exc).__name__}: {exc}"
        )
    return outcome("pass")

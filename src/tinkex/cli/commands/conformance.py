"""`tinkex conformance`: the wire contract as a test of any server, ours or another's."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from tinkex.cli.address import resolve_address
from tinkex.cli.listing import Listing
from tinkex.cli.progress import waiting
from tinkex.cli.state import Leaf, State, pass_state

_CHECKS = Listing(
    "checks",
    "",
    {
        "Section": "section",
        "Claim": "claim",
        "Status": "status",
        "Expected": "expected",
        "Got": "got",
    },
    {"pass": "green", "fail": "red", "unsupported": "yellow"},
)


@click.command(cls=Leaf)
@click.option("-m", "--model", help="Base model to test with; the first trainable by default.")
@click.option("-k", "--only", default="", help="Only checks whose section or claim contains this.")
@click.option("--timeout", type=click.FloatRange(min=1), default=120.0, help="Seconds per result.")
@pass_state
def conformance(state: State, model: str | None, only: str, timeout: float) -> None:
    """Test a Tinker server against the contract: what passes, fails and is unsupported.

    It trains and samples a little; on a hosted server that costs a little.
    """
    from tinkex.conformance import run_suite
    from tinkex.conformance.probe import Probe

    outcomes = []
    with resolve_address(state) as (base_url, api_key), waiting("Testing") as report:
        _check_reachable(base_url)
        probe = Probe(base_url, api_key, model=model, timeout_s=timeout)
        try:
            for outcome in run_suite(probe, only):
                outcomes.append(outcome)
                report(f"{outcome.status:12}{outcome.section:5}{outcome.claim}")
        finally:
            probe.close()
    if not outcomes:
        raise click.UsageError(f"No check contains '{only}'.")
    counts = Counter(outcome.status for outcome in outcomes)
    summary = ", ".join(f"{counts[status]} {status}" for status in ("pass", "fail", "unsupported"))
    data = {"counts": dict(counts), "checks": [asdict(outcome) for outcome in outcomes]}
    state.show(_CHECKS.table(outcomes, title=f"Contract: {summary}"), data)
    if counts["fail"]:
        raise click.exceptions.Exit(1)


def _check_reachable(base_url: str) -> None:
    """Refuse a server that does not answer: sixty failed checks would say less than one line."""
    import httpx

    from tinkex.wire.loopback import DIRECT

    try:
        with httpx.Client(timeout=30, mounts=DIRECT) as client:
            client.get(f"{base_url}/api/v1/healthz")
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise click.ClickException(
            f"Could not reach {base_url}: {exc}. Is the server running, and the address right?"
        ) from exc

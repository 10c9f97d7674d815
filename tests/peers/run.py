"""Run the scenario with official SDKs against `tinkex serve` and print a table of the results.

`python tests/peers/run.py [VERSION ...]` runs all of them on the toy engine and the newest one on
the torch engine, and our own SDK on both, then the exactness steps; exits 1 when a step failed.
`--engine toy|torch` chooses one engine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from reports import Report, rewrite, run_program, table
from servers import serving
from venvs import SDK_VERSIONS, sdk_python

HERE = Path(__file__).parent
TIMEOUT_S = {"toy": 240, "torch": 900}
DOCUMENT = HERE.parents[1] / "docs" / "peers.md"
OURS = "tinkex"
API_KEY = "tml-peer-key"
OTHER_KEY = "tml-other-key"


def interpreter(version: str) -> list[str]:
    """What runs a program written for the official SDK: that SDK, or ours in its place."""
    if version == OURS:
        return [sys.executable, "-m", "tinkex.compat"]
    return [str(sdk_python(version))]


def run_peer(
    version: str, engine: str, folder: Path, *flags: str, with_cli: bool = False
) -> Report:
    """One SDK version, one fresh server; with the SDK's command line too, when asked for."""
    python = interpreter(version)
    keys = ("--api-key", f"{API_KEY}=peer")
    with serving(folder, "--engine", engine, *keys, *flags) as server:
        log, url = server.log, server.base_url
        environment = {"PEER_CLI": str(int(with_cli))}
        return run_script(python, "scenario.py", version, engine, url, log, environment)


def run_exactness(engine: str, folder: Path, *flags: str, exact: bool = True) -> Report:
    """`exactness.py` with the newest SDK and two users."""
    version = SDK_VERSIONS[-1]
    python = interpreter(version)
    keys = ("--api-key", f"{API_KEY}=peer", "--api-key", f"{OTHER_KEY}=other")
    mode = ("--deterministic",) if exact else ()
    with serving(folder, "--engine", engine, *keys, *mode, *flags) as server:
        log, url = server.log, server.base_url
        environment = {"PEER_OTHER_KEY": OTHER_KEY, "PEER_EXACT": str(int(exact))}
        return run_script(python, "exactness.py", version, engine, url, log, environment)


def run_script(
    python: list[str],
    script: str,
    version: str,
    engine: str,
    base_url: str,
    server_log: Path,
    more: dict[str, str] | None = None,
) -> Report:
    """Run a script of this folder under a foreign interpreter and collect its steps."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(server_log.parent),
        "TINKER_BASE_URL": base_url,
        "TINKER_API_KEY": API_KEY,
        "PEER_ENGINE": engine,
        "PEER_LR": "0.02" if engine == "toy" else "0.002",
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }
    command, timeout_s = [*python, str(HERE / script)], TIMEOUT_S[engine]
    return run_program(command, version, engine, environment, server_log, timeout_s=timeout_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=list(SDK_VERSIONS))
    parser.add_argument("--engine", choices=("toy", "torch", "both"), default="both")
    parser.add_argument("--write", action="store_true", help="Rewrite the tables in docs/peers.md.")
    options = parser.parse_args()
    engines = ("toy", "torch") if options.engine == "both" else (options.engine,)
    scenarios, exactness = [], []
    for engine in engines:
        newest = options.versions[-1:]
        for version in [*(options.versions if engine == "toy" else newest), OURS]:
            peer = partial(run_peer, with_cli=True)
            scenarios.append(_reported("scenario", peer, version, engine))
    if SDK_VERSIONS[-1] in options.versions:
        exactness = [_reported("exactness", run_exactness, engine) for engine in engines]
    tables = [
        f"### {title}\n\n{table(reports)}"
        for title, reports in (("Scenario", scenarios), ("Exactness", exactness))
        if reports
    ]
    print("\n" + "\n\n".join(tables))
    if options.write:
        rewrite(DOCUMENT, "peers", "make test-peers", "\n\n".join(tables))
    return 0 if all(report.ok for report in scenarios + exactness) else 1


def _reported(what: str, run: Callable[..., Report], *arguments: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        report = run(*arguments, Path(folder))
    outcome = "ok" if report.ok else f"FAILED\n{report.failures}"
    print(f"{what} with {report.version} on {report.engine}: {outcome}", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())

"""Run the scenario with official SDKs against `tinkex serve` and print a table of the results.

`python tests/peers/run.py [VERSION ...]` runs all six on the toy engine and the newest one on the
torch engine, and our own SDK on both, then the exactness steps; exits 1 when a step failed.
`--engine toy|torch` chooses one engine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from servers import serving
from venvs import SDK_VERSIONS, sdk_python

HERE = Path(__file__).parent
TIMEOUT_S = {"toy": 240, "torch": 900}
DOCUMENT = HERE.parents[1] / "docs" / "peers.md"
OURS = "tinkex"
API_KEY = "tml-peer-key"
OTHER_KEY = "tml-other-key"


@dataclass
class Report:
    version: str
    engine: str
    seconds: float
    steps: dict[str, tuple[str, str]] = field(default_factory=dict)
    log: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(outcome != "failed" for outcome, _ in self.steps.values())

    @property
    def failures(self) -> str:
        lines = [f"{name}: {detail}" for name, (o, detail) in self.steps.items() if o == "failed"]
        return "\n".join(lines or ["the scenario printed nothing"]) + "\n" + self.log[-4000:]


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
    started = time.monotonic()
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
    try:
        done = subprocess.run(
            [*python, str(HERE / script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S[engine],
        )
        stdout, stderr = done.stdout, done.stderr
    except subprocess.TimeoutExpired as exc:
        stdout, stderr = _text(exc.stdout), _text(exc.stderr)
        stdout += json.dumps(
            {"step": "in time", "outcome": "failed", "detail": f"over {TIMEOUT_S[engine]} s"}
        )
    log = f"--- client\n{stderr[-3000:]}\n--- server\n{server_log.read_text()[-3000:]}"
    report = Report(version, engine, time.monotonic() - started, log=log)
    for line in stdout.splitlines():
        if line.startswith('{"step"'):
            step = json.loads(line)
            report.steps[step["step"]] = (step["outcome"], step["detail"])
    return report


def table(reports: list[Report]) -> str:
    """Steps down, SDK versions across."""
    names = list(dict.fromkeys(name for report in reports for name in report.steps))
    head = ["step", *(f"{report.version} {report.engine}" for report in reports)]
    rows = [[name, *(report.steps.get(name, ("-", ""))[0] for report in reports)] for name in names]
    rows.append(["seconds", *(f"{report.seconds:.0f}" for report in reports)])
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _text(raw: str | bytes | None) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw or ""


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
        _write("\n\n".join(tables))
    return 0 if all(report.ok for report in scenarios + exactness) else 1


def _write(tables: str) -> None:
    """Put the tables between the markers of the document, with the place and date of the run."""
    before, _, rest = DOCUMENT.read_text().partition("<!-- peers:begin -->")
    _, _, after = rest.partition("<!-- peers:end -->")
    place = f"{date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, Python "
    place += f"{platform.python_version()}, `make test-peers`"
    marked = f"<!-- peers:begin -->\n{place}\n\n{tables}\n<!-- peers:end -->"
    DOCUMENT.write_text(before + marked + after)


def _reported(what: str, run: Callable[..., Report], *arguments: str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        report = run(*arguments, Path(folder))
    outcome = "ok" if report.ok else f"FAILED\n{report.failures}"
    print(f"{what} with {report.version} on {report.engine}: {outcome}", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())

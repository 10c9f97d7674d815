"""Reports of foreign programs: run one, collect the steps that it prints, make tables of them.

A program prints a line `{"step": ..., "outcome": "ok" | "failed" | "n/a", "detail": ...}` for each
of its steps (`scenario.py: main_of`). This module does not know what the steps are.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path


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
        return "\n".join(lines or ["the program printed no step"]) + "\n" + self.log[-4000:]


def run_program(
    command: list[str],
    version: str,
    engine: str,
    environment: dict[str, str],
    server_log: Path,
    *,
    timeout_s: float,
    folder: Path | None = None,
) -> Report:
    """Run a program under a foreign interpreter, in `folder`, and collect its steps."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        stdout, stderr = done.stdout, done.stderr
        if done.returncode and '"failed"' not in stdout:
            stdout += _failed("exit status", str(done.returncode))
    except subprocess.TimeoutExpired as exc:
        stdout, stderr = _text(exc.stdout), _text(exc.stderr)
        stdout += _failed("in time", f"over {timeout_s} s")
    log = f"--- client\n{stderr[-3000:]}\n--- server\n{server_log.read_text()[-3000:]}"
    report = Report(version, engine, time.monotonic() - started, log=log)
    for line in stdout.splitlines():
        if line.startswith('{"step"'):
            step = json.loads(line)
            report.steps[step["step"]] = (step["outcome"], step["detail"])
    return report


def _failed(step: str, detail: str) -> str:
    return "\n" + json.dumps({"step": step, "outcome": "failed", "detail": detail})


def _text(raw: str | bytes | None) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw or ""


def table(reports: list[Report], first: str = "step") -> str:
    """Steps down, versions across."""
    names = list(dict.fromkeys(name for report in reports for name in report.steps))
    head = [first, *(f"{report.version} {report.engine}".strip() for report in reports)]
    rows = [[name, *(report.steps.get(name, ("-", ""))[0] for report in reports)] for name in names]
    rows.append(["seconds", *(f"{report.seconds:.0f}" for report in reports)])
    return markdown(head, rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def rewrite(document: Path, mark: str, command: str, text: str) -> None:
    """Put `text` between the markers of the document, with the place and date of the run."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, _, rest = document.read_text().partition(begin)
    _, _, after = rest.partition(end)
    place = f"{date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, Python "
    place += f"{platform.python_version()}, `{command}`"
    document.write_text(f"{before}{begin}\n{place}\n\n{text}\n{end}{after}")

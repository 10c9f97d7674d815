"""Print a benchmark's figures as a table and as JSON lines, and keep docs/benchmarks.md up to date.

    figures = [report.Figure("wire_encode", ours=9.1, peer=57.0, unit="ms", bar=1.5)]
    sys.exit(report.finish("wire", figures))

Flags every benchmark gets: `--no-bar` prints without failing, `--write` rewrites the benchmark's
table in docs/benchmarks.md between its markers. It knows nothing about what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
_LOWER_IS_BETTER = frozenset(
    {"nats", "s", "ms", "us", "ns", "MiB", "GiB", "bytes", "MB", "GB", "errors", "times", "off"}
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number. With a peer the bar is on the ratio, without one on the number itself.

    The ratio says how many times better ours is: for times and sizes peer / ours, else ours / peer.
    """

    name: str
    ours: float
    unit: str
    peer: float | None = None
    bar: float | None = None
    note: str = ""

    @property
    def lower_is_better(self) -> bool:
        return self.unit in _LOWER_IS_BETTER

    @property
    def ratio(self) -> float | None:
        if self.peer is None:
            return None
        best, other = (self.peer, self.ours) if self.lower_is_better else (self.ours, self.peer)
        return best / other if other else float("inf")

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        if self.ratio is not None:
            return self.ratio >= self.bar
        return self.ours <= self.bar if self.lower_is_better else self.ours >= self.bar

    def line(self) -> str:
        """The figure as one line of JSON."""
        fields = {"name": self.name, "ours": _rounded(self.ours), "peer": _rounded(self.peer)}
        fields |= {"unit": self.unit, "ratio": _rounded(self.ratio), "bar": self.bar}
        fields |= {"ok": self.ok}
        return json.dumps(fields | ({"note": self.note} if self.note else {}))


def finish(
    title: str, figures: Sequence[Figure], argv: Sequence[str] | None = None, *, command: str = ""
) -> int:
    """Print everything; the exit status is 1 when a bar is missed.

    Args:
        command: How to make the table again, where it is not `python benchmarks/TITLE.py`.
    """
    flags = parse(title, argv)
    table = _table(figures)
    print(f"# {title}: {hardware()}, {time.strftime('%Y-%m-%d')}, commit {commit()}\n")
    print(table + "\n")
    for figure in figures:
        print(figure.line())
    if flags.write:
        write(title, table, command=command)
    missed = [figure.name for figure in figures if not figure.ok]
    if missed:
        print(f"below the bar: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed and not flags.no_bar else 0


def parse(title: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags every benchmark has; unknown ones are the benchmark's own."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{title}.py", add_help=False)
    parser.add_argument("--no-bar", action="store_true", help="print, never fail")
    parser.add_argument("--write", action="store_true", help="rewrite the table in the docs")
    return parser.parse_known_args(argv)[0]


def _table(figures: Sequence[Figure]) -> str:
    rows = [["figure", "ours", "peer", "unit", "ratio", "bar", ""]]
    for figure in figures:
        bar = (
            "-" if figure.bar is None else f"{figure.bar:g}{'x' if figure.peer is not None else ''}"
        )
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}x"
        mark = "" if figure.bar is None else ("ok" if figure.ok else "BELOW")
        peer = "-" if figure.peer is None else _short(figure.peer)
        rows.append([figure.name, _short(figure.ours), peer, figure.unit, ratio, bar, mark])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def write(title: str, table: str, page: Path = PAGE, command: str = "") -> None:
    """Put a table between this benchmark's markers; without markers, at the end of the page."""
    command = command or f"python benchmarks/{title}.py"
    stamp = f"{hardware()}, {time.strftime('%Y-%m-%d')}, commit {commit()}. Reproduce: `{command}`."
    start, end = f"<!-- bench:{title} -->", f"<!-- /bench:{title} -->"
    block = f"{start}\n{stamp}\n\n{table}\n{end}"
    text = page.read_text() if page.exists() else "# Benchmarks\n"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: block, text)
    else:
        text = f"{text.rstrip()}\n\n## {title}\n\n{block}\n"
    page.write_text(text)


def hardware() -> str:
    """CPU, cores, and the GPU when torch already sees one."""
    name = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"model name\s*:\s*(.+)", info):
            name = found[1].strip()
    except OSError:
        pass
    text = f"{name}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        text += f", {torch.cuda.get_device_name(0)}"
    return text


def commit() -> str:
    """The short hash of the checkout, with a plus when files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        sha = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return (sha.stdout.strip() or "unknown") + ("+" if dirty.stdout.strip() else "")

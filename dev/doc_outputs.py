"""Write what each block of a page prints into a `text` block right below it, from a real run.

    python dev/doc_outputs.py docs/sampling.md ...

Runs on the default model through a private server, in a folder with the files that the pages speak
of. Blocks that print nothing get no output, and `python hosted` and `console setup` are not run.
`tests/docs/test_blocks.py` checks that no block that prints is left without one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\n", re.M | re.S)
_OUTPUT = re.compile(r"\n```text\n.*?^```\n", re.M | re.S)
MAX_LINES = 24


def write_outputs(page: Path, folder: Path) -> None:
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    parts, at = [], 0
    for block in _FENCE.finditer(text):
        if block.start() < at:
            continue  # an old output
        parts.append(text[at : block.end()])
        at = block.end()
        info = block[1].strip()
        if info not in ("python", "console"):
            continue
        printed = run_python(block[2], namespace) if info == "python" else run_console(block[2])
        if old := _OUTPUT.match(text, at):
            at = old.end()
        if shown := tidy(printed, folder):
            parts.append(f"\n```text\n{shown}\n```\n")
    page.write_text("".join(parts) + text[at:], encoding="utf-8")


def run_python(code: str, namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "block", "exec"), namespace)
    return printed.getvalue()


def run_console(block: str) -> str:
    from tinkex.cli.app import run

    printed = io.StringIO()
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            with contextlib.redirect_stdout(printed):
                status = run(shlex.split(line[2:], comments=True)[1:])
            assert status == 0, line
    return printed.getvalue()


def tidy(printed: str, folder: Path) -> str:
    """Without colours, paths of this machine and endless listings."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed).replace(str(folder), "/home/you")
    lines = "\n".join(line.rstrip() for line in plain.splitlines()).strip("\n").splitlines()
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], "..."]
    return "\n".join(lines)


def sample_files() -> None:
    """What the pages call conversations.jsonl, preferences.jsonl and rewards.py."""
    pairs = [("Who are you?", "Captain Tinker!"), ("Where to?", "To the sea!")] * 3
    _rows("conversations.jsonl", [{"prompt": q, "completion": a} for q, a in pairs])
    _rows("preferences.jsonl", [{"prompt": q, "chosen": a, "rejected": "No."} for q, a in pairs])
    if not Path("examples").exists():
        Path("examples").symlink_to(Path(__file__).resolve().parents[1] / "examples")
    Path("rewards.py").write_text(
        "def prompts():\n    return [{'prompt': 'Say yes'}, {'prompt': 'Say no'}]\n\n"
        "def reward(completion, row):\n    return float(len(completion) % 2)\n"
    )


def _rows(name: str, rows: list[dict[str, str]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("TINKEX_HOME", str(folder / ".tinkex"))
        os.environ["COLUMNS"] = "100"
        os.chdir(folder)
        for page in pages:
            sample_files()
            write_outputs(page, folder)
            print(f"{page.name}: done", file=sys.stderr)


if __name__ == "__main__":
    main()

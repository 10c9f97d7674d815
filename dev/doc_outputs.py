"""Hold the outputs that a page shows against what its blocks print, or write them anew.

    python dev/doc_outputs.py docs/sampling.md ...          # write the outputs that are not true
    python dev/doc_outputs.py --check docs/sampling.md ...  # name them, and exit with 1

The output of a block is the `text` block right below it. The blocks of a page run in order, on the
default model through a private server of their own, in a folder with the files that the pages speak
of; `python hosted` and `console setup` are not run.

An output must equal what was printed, except for what varies from run to run:
- ids, dates and times stand for any of their kind;
- `...` stands for anything in its line, alone in a line for any lines;
- a number with a decimal point may differ by 2 %, as processors round differently;
- spaces that align columns are free.

An output that is true is left as it is, so these marks survive a rewrite.
`tests/docs/test_blocks.py` runs the check.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_TIME = r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)?)?"
_DECIMAL = r"-?\d+\.\d+(?:e[+-]?\d+)?"
_VARYING = re.compile(rf"^\.\.\.\n|\.\.\.|{_ID}|{_TIME}|{_DECIMAL}|\u2500+|[ \t]+", re.M)
_TOLERANCE = 0.02
MAX_LINES = 24


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the output below it."""

    page: Path
    line: int
    """Line of the page on which the code begins, from 1."""
    info: str
    code: str
    output: str | None
    span: tuple[int, int]
    """Characters of the page, fences and output included."""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The `$ ...` lines, continuation lines joined."""
        joined = self.code.replace("\\\n", " ")
        return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text[: match.start()].count("\n") + 2,
            info=match[1].strip(),
            code=match[2],
            output=match[3],
            span=match.span(),
        )
        for match in _BLOCK.finditer(text)
    ]


def is_true(output: str | None, printed: str) -> bool:
    """Whether an output shows what was printed; see the module's docstring for what may differ."""
    if output is None:
        return not printed
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    text = "\n".join([*lines, ""])
    match = re.fullmatch(_pattern(text), f"{printed}\n")
    if match is None:
        return False
    shown = [float(found[0]) for found in _VARYING.finditer(text) if _is_decimal(found[0])]
    return all(
        abs(wanted - float(value)) <= _TOLERANCE * max(abs(wanted), 1.0)
        for wanted, value in zip(shown, match.groups(), strict=True)
    )


def _pattern(text: str) -> str:
    """An expression for what may be printed where a page shows `text`; decimals are its groups."""
    return "".join(map(_line_pattern, text.splitlines(keepends=True)))


def _line_pattern(line: str) -> str:
    if line == "...\n":
        return _stands_for(line)
    pattern, end = "", 0
    for varying in _VARYING.finditer(line):
        pattern += re.escape(line[end : varying.start()]) + _stands_for(varying[0])
        end = varying.end()
    # Atomic: every match of a line ends with it, so the first is as good as any.
    return f"(?>{pattern}{re.escape(line[end:])})"


def _stands_for(varying: str) -> str:
    if varying == "...\n":
        return r"(?:.*\n)*?"
    if varying == "...":
        return ".*?"
    if varying[0] == "\u2500":
        return "\u2500+"
    if varying.isspace():
        return r"[ \t]+"
    if _is_decimal(varying):
        return f"({_DECIMAL})"
    return _ID if re.fullmatch(_ID, varying) else _TIME


def _is_decimal(text: str) -> bool:
    return re.fullmatch(_DECIMAL, text) is not None


def run_page(page: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page in order; gives each with what it printed."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.info == "python":
            yield block, tidy(run_python(block, namespace), folder)
        elif block.info == "console":
            yield block, tidy(run_console(block), folder)


def run_python(block: Block, namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    # The empty lines make a traceback name the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_console(block: Block) -> str:
    from tinkex.cli.app import run

    printed = io.StringIO()
    for command in block.commands:
        words = shlex.split(command, comments=True)
        assert words[0] == "tinkex", f"{block.where}: only tinkex runs here; else `console setup`"
        with contextlib.redirect_stdout(printed):
            status = run(words[1:])
        assert status == 0, f"{block.where}: {command} ended with {status}"
    return printed.getvalue()


def tidy(printed: str, folder: Path) -> str:
    """Without colours, paths of this machine and endless listings."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed).replace(str(folder), "/home/you")
    lines = "\n".join(line.rstrip() for line in plain.splitlines()).strip("\n").splitlines()
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], "..."]
    return "\n".join(lines)


def sample_files() -> None:
    """Write what the pages call conversations.jsonl, preferences.jsonl and rewards.py."""
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


def check_page(page: Path, folder: Path) -> int:
    """Print the outputs that are not true, as differences; gives their number."""
    num_false = 0
    for block, printed in run_page(page, folder):
        if not is_true(block.output, printed):
            num_false += 1
            shown = (block.output or "").splitlines()
            print(f"{block.where}: the page shows (-), the block prints (+)")
            print(*difflib.unified_diff(shown, printed.splitlines(), lineterm="", n=1), sep="\n")
    return num_false


def write_page(page: Path, folder: Path) -> int:
    """Replace the outputs that are not true; gives 0, as none is left."""
    text = page.read_text(encoding="utf-8")
    parts, end = [], 0
    for block, printed in run_page(page, folder):
        if is_true(block.output, printed):
            continue
        parts.append(text[end : block.span[0]])
        parts.append(f"```{block.info}\n{block.code}```\n")
        parts.append(f"\n```text\n{printed}\n```\n" if printed else "")
        end = block.span[1]
    page.write_text("".join(parts) + text[end:], encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Outputs of the blocks of pages.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("pages", nargs="+", type=Path)
    args = parser.parse_args()
    if len(args.pages) > 1:
        # A process per page: clients of one process share a server, and a listing on a page shows
        # only what that page made.
        flags = ["--check"] if args.check else []
        commands = [[sys.executable, __file__, *flags, str(page)] for page in args.pages]
        return max(subprocess.run(command).returncode for command in commands)
    for name in [name for name in os.environ if name.startswith("TINKE")]:
        if name != "TINKEX_CACHE":  # A page shows what a newcomer sees, who has set nothing.
            del os.environ[name]
    os.environ["COLUMNS"] = "100"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # The pages show what a CPU computes, in float32.
    page = args.pages[0].resolve()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ["TINKEX_HOME"] = str(Path(name) / ".tinkex")
        os.chdir(name)
        sample_files()
        num_false = (check_page if args.check else write_page)(page, Path(name))
        os.chdir("/")
    return 1 if num_false else 0


if __name__ == "__main__":
    sys.exit(main())

"""Walk docs/first-hour.md as a newcomer would: run every command, compare what it prints.

    python dev/first_hour.py            # on the real model, minutes
    python dev/first_hour.py --toy      # on the toy engine, to see that every command works
    python dev/first_hour.py --clone    # in a fresh clone with an environment of its own

Each `$` line of a `console setup` block runs in one folder, in order. Lines that start with `>` are
typed into the command above them, on a pseudo-terminal. Of the `text` block below, every line must
come in the output, in order: numbers and ids may differ, `...` stands for anything. Prints the
seconds of each step; ends with 1 at the first one that fails. Network is not needed, but for the
installs of --clone: a tiny model in a folder like the hub's cache stands in for Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "first-hour.md"
_BLOCK = re.compile(r"^```console setup\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Step:
    command: str
    typed: tuple[str, ...]
    shown: str
    """What the page says it prints; empty for all but the last command of a block."""


def steps(page: str) -> list[Step]:
    found = []
    for block, shown in _BLOCK.findall(page):
        lines = block.replace("\\\n", " ").splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            part = lines[start:end]
            typed = tuple(line[1:].strip() for line in part if line.startswith(">"))
            command = "\n".join(line for line in part if not line.startswith(">"))
            last = start == starts[-1]
            found.append(Step(command.removeprefix("$ "), typed, shown if last else ""))
    return found


def pattern(line: str) -> str:
    """A line of the page as an expression: numbers, ids and spaces are free."""
    parts = re.split(r"([0-9a-f]{8}-[0-9a-f-]{27}|\d[\d.,]*|\s+|\.\.\.)", line.strip())
    made = ""
    for part in parts:
        if part == "...":
            made += ".*"
        elif re.fullmatch(r"[0-9a-f]{8}-[0-9a-f-]{27}", part):
            made += "[0-9a-f-]{36}"
        elif part[:1].isdigit():
            made += r"[\d.,]+"
        elif part.isspace():
            made += r"[ \t]+"  # within the line
        else:
            made += re.escape(part)
    return made


def missing(shown: str, printed: str) -> str | None:
    """The first line of the page that the output does not have, in order; None if all are there."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", printed)
    at = 0
    for line in shown.splitlines():
        if not line.strip() or set(line.strip()) <= {"\u2500", " ", "."}:
            continue
        found = re.compile(pattern(line)).search(plain, at)
        if found is None:
            return line
        at = found.end()
    return None


def run(step: Step, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    if step.typed:
        return run_on_a_terminal(step, folder, env)
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stdout


def run_on_a_terminal(step: Step, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Type each line once the program has been silent for a while, as a person would."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", step.command], env)
    printed, waiting = b"", list(step.typed)
    silent_since = began = time.monotonic()
    while time.monotonic() - began < TIMEOUT_S:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
            if not part:
                break
            printed += part
            silent_since = time.monotonic()
        elif waiting and printed and time.monotonic() - silent_since > 4:
            os.write(terminal, waiting.pop(0).encode() + b"\n")
            silent_since = time.monotonic()
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed.decode(errors="replace")


def stand_in(cache: Path, name: str) -> None:
    """A tiny model with random weights where the Hugging Face cache would have the real one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tinkex.engine.model import default_model

    place = cache / "hub" / f"models--{name.replace('/', '--')}"
    folder = place / "snapshots" / "0000000000000000000000000000000000000000"
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in default_model.folder().glob("*token*"):
        shutil.copy(file, folder)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(folder.name)


def clone(folder: Path) -> Path:
    """A clone with an environment of its own; gives the folder of its programs."""
    began = time.monotonic()
    source = Path(__file__).parents[1]
    subprocess.run(["git", "clone", "--quiet", str(source), str(folder)], check=True)
    subprocess.run(["make", "--silent", "venv"], cwd=folder, check=True)
    print(f"{time.monotonic() - began:6.1f} s  git clone && make venv", flush=True)
    return folder / ".venv" / "bin"


def main() -> int:
    parser = argparse.ArgumentParser(description="Walk docs/first-hour.md.")
    parser.add_argument("--toy", action="store_true", help="on the toy engine, outputs unchecked")
    parser.add_argument("--clone", action="store_true", help="in a fresh clone and environment")
    args = parser.parse_args()
    env = {key: value for key, value in os.environ.items() if not key.startswith("TINKE")}
    env |= {key: os.environ[key] for key in ("TINKEX_CACHE",) if key in os.environ}
    env["COLUMNS"] = "130"
    toy = args.toy
    if toy:
        env["TINKEX_LOCAL_ENGINE"] = "toy"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        programs = Path(sys.executable).parent
        if args.clone:
            programs = clone(Path(name) / "tinkex")
            env.pop("PYTHONPATH", None)
        env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
        env["HF_HOME"] = str(Path(name) / ".hub")
        stand_in(Path(env["HF_HOME"]), "Qwen/Qwen3-0.6B")
        env["TINKEX_HOME"] = str(Path(name) / ".tinkex")
        for step in steps(PAGE.read_text(encoding="utf-8")):
            began = time.monotonic()
            status, printed = run(step, Path(name), env)
            print(
                f"{time.monotonic() - began:6.1f} s  {step.command.splitlines()[0][:100]}",
                flush=True,
            )
            is_late = toy and "kill -KILL" in step.command  # a toy ends before it can be killed
            if status and not is_late:
                print(f"ended with {status}:\n{printed}")
                return 1
            if (line := missing(step.shown, printed)) is not None and not toy:
                print(f"the page says {line!r}, which did not come:\n{printed}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

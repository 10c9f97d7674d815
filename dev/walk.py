"""Commands as a user types them, each held to what it must print: the steps of a walk.

A home of its own in a temporary folder, real child processes, no mocks. A step may be interrupted
in the middle, may stay beside the later ones, and may keep what it printed for them: a command that
an output recommends is run as it was printed. Knows processes and texts, not what a walk is about.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
TIMEOUT_S = 900.0
Check = Callable[["Walk", str], str]


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """A signal in the middle of a command: when the run's log has so many steps."""

    run: str
    steps: int
    signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
    of_server: bool = False
    """The private server gets it, not the command."""


@dataclass(frozen=True, kw_only=True)
class Step:
    command: str
    """For bash; `{name}` is what an earlier step kept."""
    says: tuple[str, ...] = ()
    """Expressions that the output has, stdout and stderr together."""
    never: tuple[str, ...] = ()
    code: int = 0
    within_s: float = TIMEOUT_S
    keeps: dict[str, str] = field(default_factory=dict)
    """Name -> expression whose first group is kept under it."""
    interrupt: Interrupt | None = None
    check: Check | None = None
    """Says what is wrong with the output, or nothing."""
    stays: str = ""
    """It runs on beside the later steps, once it has said what it must; its id is kept as this."""
    ends: str = ""
    """It ends what an earlier step left running under this name, and that is waited for."""
    traceback: bool = False
    """A program of the user's may show one; `tinkex` never does."""
    toy: bool = True
    """The toy engine can run it."""


class StepError(Exception):
    """A step did not do what it must."""


class Walk:
    """A home, a folder to work in, and what the steps kept."""

    def __init__(self, top: Path, write_files: Callable[[Path], None], *, toy: bool) -> None:
        self.toy, self.folder, self.home = toy, top / "work", top / "home"
        self.folder.mkdir()
        self.home.mkdir()
        write_files(self.folder)
        self._beside: dict[str, subprocess.Popen[bytes]] = {}
        self._held = [_held_port(), _held_port()]
        port, dead = (held.getsockname()[1] for held in self._held)
        self.kept = {
            "port": str(port),
            "dead": f"http://127.0.0.1:{dead}",
            "engine": "--engine toy" if toy else "",
            # So long that a signal comes in the middle: the toy makes thirty steps a second.
            "epochs": "12" if toy else "6",
        }
        self.env = self._environment()

    def _environment(self) -> dict[str, str]:
        from tinkex.engine.model.default_model import cache_dir

        env = {key: value for key, value in os.environ.items() if not key.startswith("TINKE")}
        programs = Path(sys.executable).parent
        env |= {
            "HOME": str(self.home),
            "TINKEX_CACHE": str(cache_dir()),  # the default model, fetched once per machine
            "PATH": f"{programs}{os.pathsep}{env['PATH']}",
            "PYTHONPATH": str(SOURCE),  # of this clone, whichever one is installed
            "COLUMNS": "130",
        }
        if self.toy:
            env["TINKEX_LOCAL_ENGINE"] = "toy"
        return env

    def run(self, step: Step) -> None:
        """Run a step.

        Raises:
            StepError: It did not do what it must.
        """
        began = time.monotonic()
        command, says = self._filled(step.command), [self._filled(text) for text in step.says]
        log = self.folder.parent / f"output-{len(list(self.folder.parent.glob('output-*')))}"
        with log.open("wb") as out:
            child = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # signals go to the command alone, as on its own terminal
            )
        try:
            if step.interrupt is not None:
                self._interrupt(step.interrupt, child)
            code = self._wait(child, log, [*says, *step.keeps.values()] if step.stays else None)
        finally:
            if step.stays and child.poll() is None:
                self._beside[step.stays] = child
                self.kept[step.stays] = str(child.pid)
            else:
                _end(child)
        if step.ends:
            self._beside[step.ends].wait(timeout=TIMEOUT_S)
        printed = log.read_text(errors="replace")
        wrong = [f"did not say {text!r}" for text in _missing(says, printed)]
        wrong += self._judge(step, code, printed, time.monotonic() - began)
        if wrong:
            raise StepError(f"{'; '.join(wrong)}:\n{printed[-6000:]}")

    def _filled(self, text: str) -> str:
        return re.sub(r"\{([a-z]\w*)\}", lambda found: self.kept[found[1]], text)

    def _interrupt(self, wanted: Interrupt, child: subprocess.Popen[bytes]) -> None:
        metrics = self.folder / "runs" / wanted.run / "metrics.jsonl"
        # An earlier signal may have come late: this command must have made steps of its own.
        steps = max(wanted.steps, _lines(metrics) + 2)
        for number in wanted.signals:
            while child.poll() is None and _lines(metrics) < steps:
                time.sleep(0.02)
            if child.poll() is not None:
                return
            if wanted.of_server:
                os.kill(self.private_server(), number)
            else:
                os.killpg(child.pid, number)
            if len(wanted.signals) > 1:
                time.sleep(0.1)  # nobody presses twice within the time of a signal handler

    def private_server(self) -> int:
        """The process id of the private server."""
        name = "local-toy.json" if self.toy else "local.json"
        return int(json.loads((self.home / ".tinkex" / name).read_text())["pid"])

    def _wait(self, child: subprocess.Popen[bytes], log: Path, says: Sequence[str] | None) -> int:
        """The exit code; of a command that stays, 0 once it says what it must."""
        try:
            if says is None:
                return child.wait(timeout=TIMEOUT_S)
            deadline = time.monotonic() + TIMEOUT_S
            while child.poll() is None and time.monotonic() < deadline:
                if not _missing(says, log.read_text(errors="replace")):
                    return 0
                time.sleep(0.1)
            return child.poll() or 1
        except subprocess.TimeoutExpired:
            raise StepError(f"still ran after {TIMEOUT_S:.0f} s:\n{log.read_text()}") from None

    def _judge(self, step: Step, code: int, printed: str, seconds: float) -> list[str]:
        """What is wrong with how a step ended."""
        wrong = []
        code = code if code >= 0 else 128 - code  # as a shell tells of a signal
        if code != step.code:
            wrong.append(f"ended with {code}, not {step.code}")
        wrong += [f"said {text!r}" for text in step.never if re.search(text, printed)]
        if "Traceback" in printed and not step.traceback:
            wrong.append("showed a traceback")
        if seconds > step.within_s:
            wrong.append(f"took {seconds:.0f} s, not {step.within_s:.0f}")
        for name, text in step.keeps.items():
            if found := re.search(text, printed):
                self.kept[name] = found[1]
            else:
                wrong.append(f"did not say {text!r}")
        if step.check is not None and not wrong and (problem := step.check(self, printed)):
            wrong.append(problem)
        return wrong

    def close(self) -> None:
        """End what stayed, and the private server."""
        for held in self._held:
            held.close()
        for child in self._beside.values():
            _end(child)
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.private_server(), signal.SIGTERM)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=60)
        return
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _missing(expressions: Sequence[str], printed: str) -> list[str]:
    return [text for text in expressions if not re.search(text, printed)]


def _lines(file: Path) -> int:
    try:
        return len(file.read_bytes().splitlines())
    except OSError:
        return 0


def _held_port() -> socket.socket:
    """A port that nobody else gets, and a server may listen on: both say SO_REUSEADDR."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@contextlib.contextmanager
def walking(write_files: Callable[[Path], None], *, toy: bool) -> Iterator[Walk]:
    """A walk in a temporary folder, whose servers end with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
        walk = Walk(Path(top), write_files, toy=toy)
        try:
            yield walk
        finally:
            walk.close()

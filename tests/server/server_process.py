"""A real server process that tests may kill and start again on the same port and folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
from held_port import HeldPort
from process_settings import settings_restored


class ServerProcess:
    def __init__(
        self,
        folder: Path,
        *flags: str,
        one_thread: bool = True,
        program: Sequence[str] = ("-m", "tinkex.server"),
        guarded: bool = "PYTEST_VERSION" in os.environ,
    ) -> None:
        """`guarded`: what held its event loop fails the test; not in benchmarks, as it costs."""
        self.folder = folder
        self._guarded = guarded
        self._one_thread = one_thread
        self._program = program
        self._held = HeldPort()
        self.port = self._held.number
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._guarded:
            _, found, stack = self.log.partition("held the event loop for")
            assert not found, found + stack[:8000]

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        command = [sys.executable, *self._program, "--port", str(self.port)]
        command += ["--data-dir", str(self.folder / "data"), *self._flags]
        command += ["--debug"] if self._guarded else []
        env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
        env["TINKEX_HOME"] = str(self.folder)
        if self._one_thread:
            env["OMP_NUM_THREADS"] = "1"
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env)
        if wait:
            self.wait_started()

    def wait_started(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log
        assert json.loads(line)["port"] == self.port

    def kill(self) -> None:
        """`kill -9` of the server; its worker ends by itself."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, sig: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(sig)
        code = process.wait(timeout=200)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def worker_pids(self) -> list[int]:
        """Child processes of the server."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def kill_worker(self) -> None:
        for pid in self.worker_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def refused_start(*flags: str) -> str:
    """Everything that `tinkex serve` says before it gives up, run in this process."""
    from click.testing import CliRunner

    from tinkex.server.serve import serve

    with settings_restored():
        done = CliRunner().invoke(serve, flags)
    assert done.exit_code != 0, done.output
    assert isinstance(done.exception, SystemExit)
    return done.output

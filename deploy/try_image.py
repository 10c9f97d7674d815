"""Run the steps of the Dockerfile in a clean folder, for machines where no container can run.

    python deploy/try_image.py [--arg TORCH=cuda] [--keep]

Copies what the image copies, runs what the build stage runs, then starts the server as the image
does, asks its health check, and stops it. `/opt`, `/src`, `/data` and `/run` are folders of the new
one; users and ports are not made. Needs an index that has the packages; `--arg TORCH=cuda` takes
torch from the same one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSIDE = re.compile(r"(?<![\w.:/])/(opt/tinkex|src|data|run/secrets)\b")
START_S, STOP_S = 180.0, 60.0


def steps(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(s.split(None, 1)[0], s.split(None, 1)[1]) for s in joined.splitlines() if s.strip()]


class Image:
    def __init__(self, folder: Path, args: dict[str, str]) -> None:
        self.folder, self.args = folder, args
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "PYTHON"))}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"
        self.here = folder
        self.num_stages = 0
        self.health: list[str] = []
        self.command: list[str] = []

    def moved(self, text: str) -> str:
        return INSIDE.sub(lambda found: f"{self.folder}/{found[1]}", text)

    def do(self, instruction: str, rest: str) -> None:
        if instruction == "FROM":
            self.num_stages += 1
        elif instruction == "ARG":
            name, _, default = rest.partition("=")
            self.env[name] = self.args.get(name, default)
        elif instruction == "WORKDIR":
            self.here = Path(self.moved(rest))
            self.here.mkdir(parents=True)
        elif instruction == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            for source in sources:
                self.copy(ROOT / source, self.here / target)
        elif instruction == "RUN" and self.num_stages == 1:  # later ones make users
            print(f"$ {rest}", flush=True)
            subprocess.run(self.moved(rest), shell=True, check=True, cwd=self.here, env=self.env)
        elif instruction == "ENV":
            for word in shlex.split(self.moved(rest)):
                name, _, value = word.partition("=")
                self.env[name] = value.replace("$PATH", self.env["PATH"])
        elif instruction == "HEALTHCHECK":
            self.health = json.loads(rest[rest.index("CMD") + 3 :])
        elif instruction == "CMD":
            self.command = [self.moved(word) for word in json.loads(rest)]

    def copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def run(self) -> None:
        """Start the server on a free port, ask the health check, stop it."""
        keys = self.folder / "run" / "secrets" / "tinkex_keys"
        keys.parent.mkdir(parents=True)
        keys.write_text("tml-try=somebody\n")
        keys.chmod(0o600)
        (self.folder / "data").mkdir()
        program = shutil.which(self.command[0], path=self.env["PATH"])
        assert program is not None, f"the image has no {self.command[0]}"
        assert program.startswith(str(self.folder)), program
        command = [program, *self.command[1:], "--port", "0"]
        print(f"$ {shlex.join(command)}", flush=True)
        server = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = json.loads(server.stdout.readline())["port"]
            self.ask(str(port))
            server.send_signal(signal.SIGTERM)
            code = server.wait(STOP_S)
            assert code == 0, f"the server ended with {code}"
        finally:
            server.kill()

    def ask(self, port: str) -> None:
        check = [word.replace("8765", port) for word in self.health]
        deadline = time.monotonic() + START_S
        while subprocess.run(check, env=self.env, capture_output=True).returncode:
            assert time.monotonic() < deadline, "the health check never succeeded"
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE of a build argument")
    parser.add_argument("--keep", action="store_true", help="leave the folder for a look")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tinkex-image-"))
    image = Image(folder, dict(entry.split("=", 1) for entry in options.arg))
    try:
        for instruction, rest in steps((ROOT / "deploy" / "Dockerfile").read_text()):
            image.do(instruction, rest)
        image.run()
        print("the image's steps work: it was built, served, was healthy and stopped")
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Train while processes are killed and stopped at random moments, and compare with a calm run.

A script of a user (`tests/pool/official_run.py`: passes, own losses, samples, checkpoints) is run
twice: on a server that is left alone, and on one whose workers and API process are killed
(SIGKILL) or held up (SIGSTOP, then SIGCONT) at moments that a seed draws, several in one step too.
With two workers every pass is split between them. All numbers that the script was told, and the
files of its last checkpoint, are compared: with `--deterministic` to the bit, without it within
`TOLERANCE`, which is that of float32 sums in another order. Prints what was done as one line of
JSON, and exits 1 where anything differs.

    python dev/chaos.py [--kills 50] [--seed 0] [--sdk official|ours] [--engine torch|toy]
        [--workers 2] [--no-deterministic] [--steps 30]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
for _folder in ("harness", "server", "pool"):
    sys.path.insert(0, str(TESTS / _folder))
from kills import HERE, Killer, Outcome, kill_process, official_run  # noqa: E402
from safetensors.numpy import load  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from tiny_llama import tiny_llama  # noqa: E402

TOLERANCE = 1e-3
"""Most relative difference of a loss, and of the norm of a checkpoint's tensors, without
`--deterministic`."""
CALM_RATE = 1e-3
"""The learning rate without `--deterministic`: at ten times that rate a difference of 1e-9, which
sums in another order make, is 1e-2 after twenty steps, without any kill."""
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
LONGEST_STOP_S = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chaos:
    kills: int = 50
    seed: int = 0
    sdk: str = "official"
    engine: str = "torch"
    workers: int = 2
    deterministic: bool = True
    steps: int = 30

    @property
    def flags(self) -> tuple[str, ...]:
        how = ("--deterministic",) if self.deterministic else ()
        return ("--engine", self.engine, "--device", "cpu", *how, "--snapshot-every", "21")

    def run(self, folder: Path, model: Path) -> tuple[Outcome, Outcome]:
        """Gives how the script ended without and with disturbances."""
        rate = {} if self.deterministic else {"learning_rate": CALM_RATE}
        told: Any = {"sdk": self.sdk, "num_steps": self.steps, **rate}
        flags = (*self.flags, "--model", str(model))
        with ServerProcess(folder / "calm", *flags) as server:
            calm = official_run(server, model, **told)
        # Splits every pass it can, however small.
        eager = (str(HERE / "eager_server.py"),)
        flags += ("--workers", str(self.workers))
        with ServerProcess(folder / "disturbed", *flags, program=eager) as server:
            killer = Killer(
                weapons(server, random.Random(self.seed)),
                num_kills=self.kills,
                seed=self.seed,
                num_steps=self.steps,
            )
            disturbed = official_run(server, model, killer, **told)
        if killer.moments:
            raise RuntimeError(f"the run ended with {len(killer.moments)} kills to make")
        return calm, disturbed

    def differences(self, calm: Outcome, disturbed: Outcome) -> list[str]:
        """What the script was told otherwise, and which files are not the same."""
        exact = self.deterministic
        found = _unlike("told", calm.told, disturbed.told, exact=exact)
        if not calm.weights or calm.weights.keys() != disturbed.weights.keys():
            found.append(f"files: {sorted(calm.weights)} and {sorted(disturbed.weights)}")
        for name in calm.weights.keys() & disturbed.weights.keys():
            ours, theirs = calm.weights[name], disturbed.weights[name]
            if exact and ours != theirs:
                found.append(f"{name} has other bytes")
            elif not exact:
                found += _far(name, load(ours), load(theirs))
        return found


def weapons(server: ServerProcess, chance: random.Random) -> Mapping[str, Callable[[], None]]:
    """What is done to processes of a server, by name."""

    def some_worker() -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return chance.choice(server.worker_pids() or [0]) or None
        return None

    def kill_worker() -> None:
        if pid := some_worker():
            kill_process(pid)

    def kill_server() -> None:
        server.kill()
        server.start()

    def stop_worker() -> None:
        if pid := some_worker():
            _hold_up(pid, chance.uniform(0.1, LONGEST_STOP_S))

    def stop_server() -> None:
        _hold_up(server.pid, chance.uniform(0.1, LONGEST_STOP_S))

    def stop_and_kill() -> None:
        """A process that is killed while it is stopped never sees the end of its sockets."""
        if pid := some_worker():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 1.0))
            kill_process(pid)

    return {
        "kill worker": kill_worker,
        "kill workers": server.kill_worker,
        "kill server": kill_server,
        "stop worker": stop_worker,
        "stop server": stop_server,
        "stop and kill worker": stop_and_kill,
    }


def _hold_up(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def _unlike(name: str, ours: Any, theirs: Any, *, exact: bool) -> list[str]:
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [
            text
            for number, (a, b) in pairs
            for text in _unlike(f"{name}[{number}]", a, b, exact=exact)
        ]
    is_near = (
        not exact
        and isinstance(ours, float)
        and isinstance(theirs, float)
        and math.isclose(ours, theirs, rel_tol=TOLERANCE)
    )
    return [] if ours == theirs or is_near else [f"{name}: {ours} and {theirs}"]


def _far(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Tensors that are further from each other than sums in another order make them."""
    found = []
    for key, tensor in ours.items():
        scale = float((tensor.astype("float64") ** 2).sum()) ** 0.5
        apart = float(((tensor.astype("float64") - theirs[key]) ** 2).sum()) ** 0.5
        if apart > TOLERANCE * max(scale, 1e-6):
            found.append(f"{name} {key}: {apart:.3g} apart of {scale:.3g}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    for spec in dataclasses.fields(Chaos):
        if spec.name == "deterministic":
            parser.add_argument(
                "--deterministic", action=argparse.BooleanOptionalAction, default=spec.default
            )
        else:
            parser.add_argument(f"--{spec.name}", type=type(spec.default), default=spec.default)
    chaos = Chaos(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as place:
        model = Path(place, "model")
        tiny_llama(model, **SHAPE, max_position_embeddings=256)
        calm, disturbed = chaos.run(Path(place), model)
        found = chaos.differences(calm, disturbed)
    for text in found:
        print(text, file=sys.stderr)
    told = {
        **dataclasses.asdict(chaos),
        "done": dict(disturbed.kills),
        "replays": disturbed.num_replays,
        "shared": disturbed.num_shares,
        "numbers": len(calm.told),
        "differences": len(found),
        "calm_s": round(calm.seconds, 1),
        "disturbed_s": round(disturbed.seconds, 1),
    }
    print(json.dumps(told), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

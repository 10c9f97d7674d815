"""tinker-cookbook's arithmetic RL, unmodified, on one worker and on a pool of two: equal curves.

    python tests/compat/same_curves.py [--steps 4]

The recipe gives neither its adapter nor its samples a seed. So both servers take one for the
adapter, and draw one for each sample from its prompt and how often that was asked before
(`SEEDED`): what is left is what the pool does. Passes are split however small they are. Prints a
table of both curves; exits 1 when they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
import cookbook
from server_process import ServerProcess

SEEDED = """
import hashlib, sys
from collections import Counter
from dataclasses import replace
from tinkex.server import validation
from tinkex.server.serve import serve
from tinkex.server.workers import home

home.PART_S = -1e6
draw, asked = validation.sample_job, Counter()

def sample_job(request, **about):
    job = draw(request, **about)
    if job.seed is not None:
        return job
    key = (about["folder"] is None, job.prompt.tobytes())
    asked[key] += 1
    content = hashlib.sha256(repr((key, asked[key])).encode()).digest()
    return replace(job, seed=int.from_bytes(content[:4], "little"))

spec = validation.lora_spec
validation.lora_spec = lambda config, seed: spec(config, 7)
validation.sample_job = sample_job
serve()
"""
CURVES = (
    "env/all/reward/total",
    "env/all/correct",
    "optim/entropy",
    "optim/kl_sample_train_v1",
    "env/all/ac_tokens_per_turn",
)


def curves(num_workers: int, num_steps: int, scratch: Path) -> tuple[list[dict], str, float]:
    """The recipe's metrics by step, the server's log, and the seconds it took."""
    from tinkex.engine.model import default_model

    place = scratch / str(num_workers)
    work = place / "work"
    cookbook.make_workplace(work, default_model.folder())
    flags = ("--deterministic", "--device", "cpu", "--workers", str(num_workers))
    program = ("-c", SEEDED)
    began = time.monotonic()
    with ServerProcess(place / "server", *flags, one_thread=True, program=program) as server:
        done = cookbook.math_rl(server.base_url, work, place / "log", f"max_steps={num_steps}")
        log = server.log
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:] + log[-3000:])
    rows = (place / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows], log, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        one, _, one_s = curves(1, options.steps, Path(scratch))
        two, log, two_s = curves(2, options.steps, Path(scratch))
    num_shared = log.count("is shared by 2 workers")
    names = [name for name in CURVES if name in one[0]]
    print("| step | curve | one worker | two workers |\n|---|---|---|---|")
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        for name in names:
            print(f"| {step} | {name} | {a[name]!r} | {b[name]!r} |")
    # The order in which the answers of a group arrive may vary, and with it the last bit of a mean.
    differing = [
        name
        for a, b in zip(one, two, strict=True)
        for name in names
        if not math.isclose(a[name], b[name], rel_tol=1e-6, abs_tol=1e-9)
    ]
    print(f"\n{len(one)} steps; one worker {one_s:.0f} s, two {two_s:.0f} s, shared {num_shared} x")
    print(json.dumps({"name": "same_curves", "differing": differing, "shared": num_shared}))
    sys.exit(bool(differing) or not num_shared)


if __name__ == "__main__":
    main()

"""Hold the arithmetic of docs/scale.md against a real server with toy engines.

    python dev/scale_simulation.py [--workers 1,8] [--tenants 1000]

Everything is real but the device: API process, journal, pool, routing, SDK. The toy engine sleeps
for as long as one H200 was measured to take for Qwen3-8B (docs/benchmarks.md), times `SLOWER` for
decoding and `TRAIN_SLOWER` for training, so that two cores can carry many workers; rates are
printed as they would be without. A row is ok when the pool reaches nine tenths of the paper's.
Samples are of many lengths, as real ones are, and the rate is that of the middle half of them: all
places are taken then. What a sample costs client, API and workers in CPU time is printed too.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import tinkex
from tinkex import types

SLOWER = 30.0
TRAIN_SLOWER = 3.0
BATCH = 128
DECODE_STEP_S = BATCH / 11_204
"""One token for each of 128 sequences with 16 adapters: gpu_decode_128_16_adapters."""
TRAIN_S = 16_384 / 16_306
"""A pass of 8 x 2,048 tokens: gpu_train_8x2048."""
NUM_TOKENS = (32, 96)
"""Samples are from so many to so many tokens long, 64 on average."""
NUM_WAVES = 3
NUM_STEPS = 3


@contextmanager
def server(
    *flags: str, show_cpu: bool = False, **settings: float
) -> Iterator[tinkex.ServiceClient]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "server.toml"
        config.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--config", str(config)]
        command += ["--data-dir", f"{folder}/data", *flags]
        with Path(folder, "server.log").open("wb") as log:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert child.stdout is not None
        url = json.loads(child.stdout.readline())["base_url"]
        try:
            with tinkex.ServiceClient(base_url=url, api_key="tml-scale") as service:
                yield service
                if show_cpu:
                    print(f"CPU seconds: {_cpu_seconds(child.pid)}", file=sys.stderr)
        finally:
            child.terminate()
            child.wait(60)


def sampling(num_workers: int) -> tuple[float, float]:
    """Tokens a second on paper, and as measured."""
    engine = f"toy:token_latency_s={DECODE_STEP_S * SLOWER}"
    flags = ("--engine", engine, "--workers", str(num_workers))
    # One key never takes the last eighth of the places: they are for whoever comes next.
    most = -(-BATCH * 8 // 7)
    with server(*flags, show_cpu=True, max_running_samples=most) as service:
        training = service.create_lora_training_client("toy", rank=8).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [types.ModelInput.from_ints([1, 2, n % 1000]) for n in range(BATCH * num_workers)]
        sampler.sample(prompts[0], 1, types.SamplingParams(max_tokens=1)).result()
        lengths = np.random.default_rng(0).integers(
            NUM_TOKENS[0], NUM_TOKENS[1] + 1, NUM_WAVES * len(prompts)
        )
        ends: list[tuple[float, int]] = []

        def note(done: Any) -> None:
            ends.append((time.monotonic(), len(done.result().sequences[0].tokens_np)))

        waiting = []
        for prompt, length in zip(prompts * NUM_WAVES, lengths.tolist(), strict=True):
            params = types.SamplingParams(max_tokens=length, stop=[])
            waiting.append(sampler.sample(prompt, 1, params))
            waiting[-1].add_done_callback(note)
        for future in waiting:
            future.result()
    num_places = most * num_workers - most * num_workers // 8
    on_paper = _ideal_ends(lengths.tolist(), num_places)
    return _middle_rate(on_paper), _middle_rate(ends) * SLOWER


def _ideal_ends(lengths: list[int], num_places: int) -> list[tuple[float, int]]:
    """When each sample would end if a place that is free had the next one at once."""
    free_at = [0.0] * num_places
    ends = []
    for length in lengths:
        end = heapq.heappop(free_at) + length * DECODE_STEP_S
        heapq.heappush(free_at, end)
        ends.append((end, length))
    return ends


def _middle_rate(ends: list[tuple[float, int]]) -> float:
    """Tokens a second between the first and the last quarter of all ends."""
    ends = sorted(ends)[len(ends) // 4 : -len(ends) // 4]
    return sum(count for _, count in ends[1:]) / (ends[-1][0] - ends[0][0])


def _cpu_seconds(pid: int) -> dict[str, float]:
    """What this process, the API and all workers took so far."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def spent(process: int) -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * tick_s

    workers = sum(spent(int(child)) for child in children)
    seconds = {"client": time.process_time(), "API": spent(pid), "workers": workers}
    return {name: round(value, 1) for name, value in seconds.items()}


def training(num_workers: int) -> tuple[float, float]:
    """Tokens a second on paper, and as measured, of two runs for each worker.

    The toy's step costs as much as its pass, so a step counts for two passes.
    """
    engine = f"toy:latency_s={TRAIN_S * TRAIN_SLOWER}"
    flags = ("--engine", engine, "--workers", str(num_workers))
    with server(*flags, max_running_training=1) as service:
        wishes = [
            service.create_lora_training_client("toy", rank=8) for _ in range(2 * num_workers)
        ]
        runs = [wish.result() for wish in wishes]
        batch, adam = [_datum()], types.AdamParams(learning_rate=1e-3)
        started = time.monotonic()
        steps = [r.train_step(batch, "cross_entropy", adam) for _ in range(NUM_STEPS) for r in runs]
        for step in steps:
            step.result()
        spent_s = time.monotonic() - started
    passes = 2 * len(steps)
    num_places = num_workers - num_workers // 8  # one key leaves the last eighth to others
    return num_places * 16_384 / TRAIN_S, passes * 16_384 / spent_s * TRAIN_SLOWER


def tenants(count: int) -> tuple[float, float]:
    """Requests a second that 1,000 tenants need at a step every 30 s, and what one API serves."""
    with server("--engine", "toy", "--workers", "4") as service:
        runs = _runs(service, count)
        batch, adam = [_datum()], types.AdamParams(learning_rate=1e-3)
        started = time.monotonic()
        steps = [run.train_step(batch, "cross_entropy", adam) for _ in range(2) for run in runs]
        for step in steps:
            step.result()
        spent_s = time.monotonic() - started
    return 2 * count / 30, 2 * len(steps) / spent_s


def _runs(service: tinkex.ServiceClient, count: int) -> list[tinkex.TrainingClient]:
    wishes = [service.create_lora_training_client("toy", rank=8) for _ in range(count)]
    return [wish.result() for wish in wishes]


def _datum() -> types.Datum:
    tokens = np.arange(1, 33)
    inputs = {"target_tokens": tokens, "weights": np.ones(32, np.float32)}
    return types.Datum(types.ModelInput.from_ints(tokens.tolist()), inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="1,8", help="numbers of workers, by commas")
    parser.add_argument("--tenants", type=int, default=1000)
    options = parser.parse_args()
    counts = [int(text) for text in options.workers.split(",")]
    rows = [(f"sampling, {n} workers", "tokens/s", *sampling(n)) for n in counts]
    rows += [(f"training, {n} workers, {2 * n} runs", "tokens/s", *training(n)) for n in counts]
    if options.tenants:
        rows.append((f"{options.tenants} tenants", "requests/s", *tenants(options.tenants)))
    print(f"\n{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}\n")
    print("| layout | on paper | measured | unit | |\n|---|---|---|---|---|")
    is_ok = True
    for name, unit, paper, measured in rows:
        is_ok &= measured >= 0.9 * paper
        verdict = "ok" if measured >= 0.9 * paper else "BELOW"
        print(f"| {name} | {paper:,.0f} | {measured:,.0f} | {unit} | {verdict} |")
    sys.exit(not is_ok)


if __name__ == "__main__":
    main()

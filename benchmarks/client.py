"""The SDK against the official one, on one toy server, in one run.

Each figure comes from child processes that do the same work with the same public calls: 2,000
samples in flight at once, a training loop of 200 steps, an idle client. Ours is measured twice: as
it speaks to a Tinkex server (samples in batches) and in plain contract mode, where the server's own
work per request sets the pace. The peer is the official SDK 0.36.0; for `http1_vs_httpx` it is our
own SDK in plain contract mode on httpx, which says what `client/http/http1.py` is worth.

    python benchmarks/client.py [--no-bar] [--write] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import os
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import report

ROOT = Path(__file__).resolve().parent.parent
PEER = "0.36.0"
NUM_SAMPLES = 2000
NUM_STEPS = 200
PROMPT = list(range(100, 200))

# ------------------------------------------------------------------- what a child process does


def work(sdk: str, task: str, base_url: str) -> dict[str, float]:
    """Runs in the environment of the SDK it measures; knows nothing but public names."""
    import importlib

    api: Any = importlib.import_module(sdk)
    if os.environ.get("BENCH_HTTPX"):  # the same SDK on httpx, to weigh our own HTTP/1.1 against it
        backends: Any = importlib.import_module("tinkex.client.http.backends")
        backends._has_proxy = lambda url: True
    service = api.ServiceClient(base_url=base_url, api_key="tml-bench")
    model = service.get_server_capabilities().supported_models[0].model_name
    if task == "idle":
        sampler = service.create_sampling_client(base_model=model)
        time.sleep(0.5)
        return {"rss_mb": _rss_mb(), "alive": float(sampler is not None)}
    if task == "samples":
        return asyncio.run(_samples(api, service, model))
    return _steps(api, service, model)


async def _samples(api: Any, service: Any, model: str) -> dict[str, float]:
    sampler = await service.create_sampling_client_async(base_model=model)
    prompt = api.ModelInput.from_ints(PROMPT)
    params = api.SamplingParams(max_tokens=8, seed=1)

    async def burst(number: int) -> None:
        answers = await asyncio.gather(
            *(sampler.sample_async(prompt, 1, params) for _ in range(number))
        )
        assert all(len(answer.sequences[0].tokens) == 8 for answer in answers)

    await burst(50)
    gc.collect()  # else one run pays for what another left behind
    cpu, wall = time.process_time(), time.perf_counter()
    await burst(NUM_SAMPLES)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu_ms": 1000 * cpu / NUM_SAMPLES, "per_s": NUM_SAMPLES / wall}


def _steps(api: Any, service: Any, model: str) -> dict[str, float]:
    client = service.create_lora_training_client(model, rank=8, seed=1)
    tokens = PROMPT[:16]
    datum = api.Datum(
        model_input=api.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * len(tokens)},
    )
    data = [datum] * 2

    def step() -> None:
        loss = client.forward_backward(data, "cross_entropy")
        done = client.optim_step(api.AdamParams(learning_rate=1e-4))
        loss.result()
        done.result()

    for _ in range(5):
        step()
    cpu, times = time.process_time(), []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    cpu = time.process_time() - cpu
    return {"cpu_ms": 1000 * cpu / NUM_STEPS, "median_ms": 1000 * statistics.median(times)}


def _rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------- the comparison


@functools.cache
def peer_python() -> Path:
    """The interpreter with the official SDK; its environment is built when it is not cached yet."""
    python: Path = runpy.run_path(str(ROOT / "tests/peers/venvs.py"))["sdk_python"](PEER)
    return python


def measure(who: str, task: str, base_url: str) -> dict[str, float]:
    """One child process: `official`, `ours`, `plain` (ours without extensions), `httpx` (that on
    httpx in place of our own HTTP/1.1)."""
    python = str(peer_python()) if who == "official" else sys.executable
    sdk = "tinker" if who == "official" else "tinkex"
    env = {**os.environ, "TINKER_TELEMETRY": "0"}
    env["TINKEX_CLIENT_EXTENSIONS"] = "0" if who in ("plain", "httpx") else "1"
    env["BENCH_HTTPX"] = "1" if who == "httpx" else ""
    done = subprocess.run(
        [python, __file__, "--work", task, "--sdk", sdk, "--base-url", base_url],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{who} failed at {task}:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(rounds: int) -> list[report.Figure]:
    import report

    sys.path.insert(0, str(ROOT / "tests" / "server"))
    from server_process import ServerProcess

    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    flags = ("--engine", "toy", "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder), *flags) as server:
        for _ in range(rounds):
            for task in ("samples", "steps", "idle"):
                for who in ("official", "ours", "plain", "httpx"):
                    if task == "idle" and who in ("plain", "httpx"):
                        continue
                    runs.setdefault((who, task), []).append(measure(who, task, server.base_url))

    def best(who: str, task: str, key: str) -> float:
        """Of all rounds: other work on the machine only ever makes a figure worse."""
        values = [run[key] for run in runs[who, task]]
        return max(values) if key == "per_s" else min(values)

    def figure(
        name: str, who: str, task: str, key: str, unit: str, bar: float, peer: str = "official"
    ) -> report.Figure:
        return report.Figure(
            name=f"client_{name}",
            ours=best(who, task, key),
            peer=best(peer, task, key),
            unit=unit,
            bar=bar,
        )

    return [
        figure("cpu_per_sample", "ours", "samples", "cpu_ms", "ms", 3.0),
        figure("samples_per_s", "ours", "samples", "per_s", "samples/s", 2.0),
        figure("cpu_per_sample_plain_contract", "plain", "samples", "cpu_ms", "ms", 3.0),
        figure("samples_per_s_plain_contract", "plain", "samples", "per_s", "samples/s", 1.0),
        figure("cpu_per_train_step", "ours", "steps", "cpu_ms", "ms", 1.0),
        figure("train_step", "ours", "steps", "median_ms", "ms", 1.0),
        figure("cpu_per_sample_http1_vs_httpx", "plain", "samples", "cpu_ms", "ms", 1.5, "httpx"),
        figure("cpu_per_train_step_http1_vs_httpx", "plain", "steps", "cpu_ms", "ms", 1.5, "httpx"),
        figure("idle_memory", "ours", "idle", "rss_mb", "MB", 2.0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=3)
    for name in ("--work", "--sdk", "--base-url"):
        parser.add_argument(name)
    args, _ = parser.parse_known_args()
    if args.work:
        print(json.dumps(work(args.sdk, args.work, args.base_url)), flush=True)
        return 0
    import report

    report.parse("client")
    return report.finish("client", compare(args.rounds))


if __name__ == "__main__":
    sys.exit(main())

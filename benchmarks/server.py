"""What the server adds to compute, and whether it stays as quick as history grows.

- `roundtrip`: forward_backward + optim_step by the official SDK 0.36.0 over the toy engine, whose
  compute takes microseconds; what is left is client, HTTP, journal (an fsync each) and queue.
- `steady`: 100,000 requests of 8 training clients; the slowest 5,000 in a row against the first
  1,000 after the warm-up, and what the server's memory grew by.
- `ageing`: the same against the first 1,000 of a fresh server that takes turns with the old one, so
  that both see the same seconds of the machine. A shared host wanders by more than the server does.
- `heartbeat`: p99 while 2,000 samples and 32 training clients are under way.

    python benchmarks/server.py [--no-bar] [--requests 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parent.parent
for folder in ("server", "peers"):
    sys.path.insert(0, str(ROOT / "tests" / folder))
from raw_http import Connection  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from test_load import run_load  # noqa: E402
from venvs import sdk_python  # noqa: E402
from wire_client import model_body, train_body  # noqa: E402

PROTO = "application/x-protobuf"
NUM_CLIENTS = 8
WINDOW = 5000
TURN = 200
ROUND_TRIPS = 300

OFFICIAL = """
import json, sys, time, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-bench")
trainer = service.create_lora_training_client("toy", rank=8, seed=1)
tokens = list(range(1, 17))
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens),
    loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * 16},
)
times = []
for step in range(int(sys.argv[2]) + 20):
    started = time.perf_counter()
    passed = trainer.forward_backward([datum], "cross_entropy")
    done = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    passed.result(), done.result()
    times.append(time.perf_counter() - started)
print(json.dumps(times[20:]))
"""


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[ServerProcess]:
    quiet = ("--engine", "toy", "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder:
        with ServerProcess(Path(folder), *quiet, *flags) as server:
            yield server


def measure_roundtrip() -> list[report.Figure]:
    compute_s = measure_compute()
    safe, unsafe = _roundtrips(), _roundtrips("--no-power-safe")
    note = f"official client 0.36.0; compute {1000 * compute_s:.2f} ms taken off"
    return [
        report.Figure(
            name="server_roundtrip_added_median",
            ours=1000 * (statistics.median(safe) - compute_s),
            unit="ms",
            bar=15.0,
            note=note,
        ),
        report.Figure(
            name="server_roundtrip_added_median_without_fsync",
            ours=1000 * (statistics.median(unsafe) - compute_s),
            unit="ms",
            bar=15.0,
            note=f"{note}; --no-power-safe",
        ),
    ]


def _roundtrips(*flags: str) -> list[float]:
    """Seconds of each forward_backward + optim_step of the official client."""
    with serving(*flags) as server:
        command = [str(sdk_python("0.36.0")), "-c", OFFICIAL, server.base_url, str(ROUND_TRIPS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    times: list[float] = json.loads(done.stdout)
    return times


def measure_compute() -> float:
    """Seconds the toy engine itself takes for the same two jobs."""
    import numpy as np

    from tinkex.contract.optimizers import AdamParams
    from tinkex.engine import jobs
    from tinkex.engine.toy.engine import toy_engine

    engine, results = toy_engine(), queue.SimpleQueue()

    def run(job: jobs.Job) -> None:
        engine.submit(job, results.put)
        while not isinstance(results.get(), jobs.Done):
            pass

    run(
        jobs.CreateAdapterJob(
            job_id="c", adapter_id="a", base_model="toy", lora=jobs.LoraSpec(rank=8, seed=1)
        )
    )
    tokens = np.arange(1, 17)
    inputs = {"target_tokens": tokens, "weights": np.ones(16, np.float32)}
    datum = jobs.TrainDatum(tokens=tokens, inputs=inputs)
    times = []
    for step in range(50):
        started = time.perf_counter()
        run(
            jobs.TrainJob(job_id=f"t{step}", adapter_id="a", data=(datum,), loss_fn="cross_entropy")
        )
        run(jobs.OptimJob(job_id=f"o{step}", adapter_id="a", params=AdamParams()))
        times.append(time.perf_counter() - started)
    engine.close()
    return statistics.median(times)


def measure_steady(num_requests: int) -> list[report.Figure]:
    with serving() as server:
        times: list[float] = []
        memory = asyncio.run(_hammer(server, num_requests, times))
    times.sort()
    first = _rate(times, 0, 1000)
    window = min(WINDOW, max(1000, num_requests // 20))
    rates = [_rate(times, start, window) for start in range(0, len(times) - window + 1, window)]
    return [
        report.Figure(name="server_requests", ours=statistics.median(rates), unit="requests/s"),
        report.Figure(
            name="server_slowest_share_of_first",
            ours=min(rates) / first,
            unit="of the first 1,000",
            bar=0.8,
            note=f"{len(times):,} requests, windows of {window:,}",
        ),
        report.Figure(
            name="server_memory_growth",
            ours=memory[-1] - memory[0],
            unit="MiB",
            bar=64.0,
            note=f"from {memory[0]:.0f} MiB after a fifth of the requests",
        ),
    ]


def _rate(times: list[float], start: int, count: int) -> float:
    return (count - 1) / (times[start + count - 1] - times[start])


async def _hammer(server: ServerProcess, num_requests: int, times: list[float]) -> list[float]:
    """Training clients that submit and fetch in turn; gives the memory after each tenth."""
    clients = await Clients.warm(server.port)
    memory: list[float] = []
    next_mark = num_requests // 5
    work = asyncio.create_task(clients.run(num_requests, times))
    while not work.done():
        await asyncio.sleep(0.2)
        if len(times) >= next_mark:
            memory.append(_rss_mib(server.pid))
            next_mark += num_requests // 10
    await work
    clients.close()
    return [*memory, _rss_mib(server.pid)]


def measure_ageing(num_requests: int) -> list[report.Figure]:
    shares = asyncio.run(_beside_fresh(max(1, num_requests // WINDOW)))
    middle = statistics.median(shares)
    return [
        report.Figure(
            name="server_slowest_share_of_fresh",
            ours=min(shares),
            unit="of a fresh server's first 1,000",
            bar=0.8,
            note=f"{len(shares)} windows of {WINDOW:,}, in turns; median {middle:.3f}",
        )
    ]


async def _beside_fresh(num_windows: int) -> list[float]:
    """The rate of each window of one server as a share of the first 1,000 of a new one."""
    shares = []
    with serving() as old_server:
        old = await Clients.warm(old_server.port)
        for _ in range(num_windows):
            with serving() as fresh_server:
                fresh = await Clients.warm(fresh_server.port)
                old_s = fresh_s = 0.0
                for _ in range(1000 // TURN):
                    fresh_s += await fresh.run(TURN)
                    for _ in range(WINDOW // 1000):
                        old_s += await old.run(TURN)
                fresh.close()
            shares.append((WINDOW / old_s) / (1000 / fresh_s))
        old.close()
    return shares


class Clients:
    """Training clients of one server, each with a model of its own."""

    def __init__(self, port: int) -> None:
        self._connections = [Connection(port, key="tml-bench") for _ in range(NUM_CLIENTS)]
        self._models: list[str] = []
        self._numbers = [0] * NUM_CLIENTS

    @classmethod
    async def warm(cls, port: int) -> Clients:
        """Clients of a server that others have used before."""
        others = await cls(port).open()
        await others.run(40 * NUM_CLIENTS)
        others.close()
        return await cls(port).open()

    async def open(self) -> Clients:
        self._models = await asyncio.gather(*(_new_model(c) for c in self._connections))
        return self

    async def run(self, num_requests: int, times: list[float] | None = None) -> float:
        """Submit and fetch, whichever client is free; gives the seconds it took."""
        times = [] if times is None else times
        budget = iter(range(num_requests // 2))
        started = time.perf_counter()
        await asyncio.gather(*(self._run_one(i, budget, times) for i in range(NUM_CLIENTS)))
        return time.perf_counter() - started

    async def _run_one(self, index: int, budget: Iterator[int], times: list[float]) -> None:
        connection = self._connections[index]
        for _ in budget:
            self._numbers[index] += 1
            data = train_body(self._models[index], self._numbers[index], [1, 2, 3, 4])
            promise = await connection.ok("forward_backward", data, kind=PROTO)
            times.append(time.perf_counter())
            await connection.settled(promise, accept=PROTO)
            times.append(time.perf_counter())

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


async def _new_model(connection: Connection) -> str:
    session = (await connection.ok("create_session", {"tags": [], "sdk_version": "bench"}))[
        "session_id"
    ]
    await connection.settled(await connection.ok("create_model", model_body(session)))
    return f"{session}:train:0"


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_heartbeat() -> list[report.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        p99 = run_load(Path(folder), 2000, 32, 20)
    return [
        report.Figure(
            name="server_heartbeat_p99",
            ours=1000 * p99,
            unit="ms",
            bar=200.0,
            note="2,000 samples and 32 training clients at once",
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=100_000)
    options, rest = parser.parse_known_args()
    figures = [
        *measure_roundtrip(),
        *measure_steady(options.requests),
        *measure_ageing(options.requests),
        *measure_heartbeat(),
    ]
    return report.finish("server", figures, rest)


if __name__ == "__main__":
    sys.exit(main())

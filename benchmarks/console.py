"""What the console costs: pages beside training, a list of ten thousand runs, a million points.

Training runs on the toy engine with 10 ms a job, so that the server has as much to do for a step as
with a real model and the engine is what a step waits for. Pages are their streams of events, read
to the end, as a browser does; the run they show has full curves. Windows with and without pages
take turns, because a shared machine drifts.

    python benchmarks/console.py [--no-bar] [--seconds 4] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import report

import tinkex
from tinkex.server.runs.curves import Curve, LiveCurves
from tinkex.store import Model, Session, Store, StoredCurve

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "server"))
from server_process import ServerProcess  # noqa: E402

NUM_RUNS = 10_000
NUM_PAGES = 5
METRICS = [f"metric_{index}" for index in range(10)]
MIB = 1024 * 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------ pages and training


READER = """
import os, sys, threading, httpx
client = httpx.Client(timeout=None)
def read():
    with client.stream("GET", sys.argv[1]) as stream:
        os.write(1, b"open\\n")
        for _ in stream.iter_raw():
            pass
for _ in range(int(sys.argv[2])):
    threading.Thread(target=read).start()
"""


@contextlib.contextmanager
def open_pages(base_url: str, run_id: str, count: int) -> Iterator[None]:
    """Streams of the pages of a run, read by a process of their own, as by a browser."""
    command = [sys.executable, "-c", READER, f"{base_url}/console/api/runs/{run_id}/live"]
    reader = subprocess.Popen([*command, str(count)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    try:
        for _ in range(count):
            assert reader.stdout.readline() == "open\n"
        time.sleep(1.0)  # the first event has the whole of every curve
        yield
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close()


def _datum() -> tinkex.Datum:
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )


def train(training: tinkex.TrainingClient, seconds: float) -> float:
    """Steps a second; the next step is sent before the last one's result is read."""
    datum, params = _datum(), tinkex.AdamParams(learning_rate=0.01)
    num_steps, began, waiting = 0, time.monotonic(), None
    while time.monotonic() - began < seconds:
        training.forward_backward([datum], "cross_entropy")
        step = training.optim_step(params)
        if waiting is not None:
            waiting.result()
        waiting, num_steps = step, num_steps + 1
    if waiting is not None:
        waiting.result()
    return num_steps / (time.monotonic() - began)


def beside_training(folder: Path, seconds: float, rounds: int) -> list[report.Figure]:
    with ServerProcess(folder, "--engine", "toy:latency_s=0.01") as server:
        with tinkex.ServiceClient(base_url=server.base_url) as service:
            training = service.create_lora_training_client(base_model="toy", rank=4)
            for step in range(1500):
                told = training.log_metrics(dict.fromkeys(METRICS, float(step)), step=step)
            told.result()
            train(training, seconds)
            plain, watched = [], []
            for _ in range(rounds):
                plain.append(_window(server, training, seconds))
                with open_pages(server.base_url, training.model_id, NUM_PAGES):
                    watched.append(_window(server, training, seconds))
    cost_ms = 1000 * (_middle(watched, "cpu") - _middle(plain, "cpu")) / NUM_PAGES
    return [
        report.Figure(name="open_page_cpu_a_second", ours=max(cost_ms, 0.0), unit="ms", bar=10.0),
        report.Figure(
            name="steps_with_five_pages",
            ours=_middle(watched, "steps"),
            peer=_middle(plain, "steps"),
            unit="steps/s",
            bar=0.99,
        ),
    ]


def _middle(windows: list[SimpleNamespace], name: str) -> float:
    return statistics.median(getattr(window, name) for window in windows)


def _window(
    server: ServerProcess, training: tinkex.TrainingClient, seconds: float
) -> SimpleNamespace:
    before = cpu_s(server.pid)
    began = time.monotonic()
    steps = train(training, seconds)
    return SimpleNamespace(
        steps=steps, cpu=(cpu_s(server.pid) - before) / (time.monotonic() - began)
    )


# ------------------------------------------------------------------------------ the list


def fill(data_dir: Path) -> None:
    """A store with many finished runs of one user, each with the curves that the list shows."""
    store = Store.in_folder(data_dir)
    store.accounts.ensure_user("local")
    curve = Curve()
    for step in range(1000):
        curve.add(step, 1 / (step + 1), float(step))
    points = curve.packed()
    now = time.time()
    for index in range(NUM_RUNS):
        session = Session(
            session_id=f"s{index}",
            user_id="local",
            created_at=now - index,
            last_heartbeat=now - index,
            tags=["a", f"t{index % 7}"],
            user_metadata={},
            display_name=f"run number {index}",
            project_id=None,
            sdk_version="bench",
            status={"type": "active"},
        )
        store.sessions.create(session)
        store.models.create(
            Model(
                model_id=f"s{index}:train:0",
                session_id=f"s{index}",
                user_id="local",
                model_seq_id=0,
                base_model="toy",
                lora={"rank": 8},
                optimizer_config={"type": "adamw"},
                user_metadata=None,
                created_at=now - index,
                last_request_time=now - index,
                corrupted=False,
                unloaded=False,
            )
        )
        if index < 500:
            names = ("loss_per_token", "learning_rate", "tokens")
            store.curves.save(
                StoredCurve(model_id=f"s{index}:train:0", name=name, stride=1, points=points)
                for name in names
            )
    store.close()


def the_list(folder: Path) -> list[report.Figure]:
    fill(folder / "data")
    asked = {"page": {}, "search": {"q": "number 99"}, "tag": {"tag": "t3"}, "deep": {"page": 100}}
    figures = []
    with (
        ServerProcess(folder, "--engine", "toy") as server,
        httpx.Client(base_url=server.base_url) as client,
    ):
        for name, params in asked.items():
            times = []
            for _ in range(15):
                began = time.monotonic()
                answer = client.get("/console", params=params)
                times.append(1000 * (time.monotonic() - began))
                assert answer.status_code == 200, answer.text
                assert "run number" in answer.text
            figure = report.Figure(
                name=f"list_of_10000_{name}", ours=statistics.median(times), unit="ms", bar=100.0
            )
            figures.append(figure)
    return figures


# ------------------------------------------------------------------------------ a million points


def a_million(folder: Path) -> list[report.Figure]:
    """In a process of its own, so that its memory is that of the curves."""
    told = subprocess.run(
        [sys.executable, __file__, "--points-in", str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    memory, disk, fresh_us, late_us = map(float, told.stdout.split())
    return [
        report.Figure(name="million_points_memory", ours=memory / MIB, unit="MB", bar=64.0),
        report.Figure(name="million_points_disk", ours=disk / MIB, unit="MB", bar=64.0),
        report.Figure(
            name="step_after_a_million_points", ours=late_us, peer=fresh_us, unit="us", bar=0.8
        ),
    ]


async def log_a_million(folder: Path) -> tuple[int, int, float, float]:
    store = Store.in_folder(folder)
    curves = LiveCurves(store)
    names = [f"metric_{index}" for index in range(20)]
    fresh_us = await _step_us(curves, "fresh")
    before = _memory_bytes()
    for step in range(50_000):
        await curves.log("run", dict.fromkeys(names, step / 3), step)
        if step % 5000 == 0:
            await curves.flush()
    await curves.flush()
    memory = _memory_bytes() - before
    late_us = await _step_us(curves, "run")
    store.close()
    disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return memory, disk, fresh_us, late_us


async def _step_us(curves: LiveCurves, run_id: str) -> float:
    """What a step costs the event loop, in microseconds."""
    times = []
    for _ in range(500):
        began = time.perf_counter()
        await curves.passed(run_id, {"loss:sum": 1.0, "num_tokens:sum": 10.0})
        await curves.stepped(run_id, {"grad_norm:mean": 1.0}, 0.1)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points-in")
    flags = parser.parse_known_args()[0]
    if flags.points_in:
        print(*asyncio.run(log_a_million(Path(flags.points_in))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = beside_training(folder / "training", flags.seconds, flags.rounds)
        figures += the_list(folder / "list")
        figures += a_million(folder / "points")
    return report.finish("console", figures)


if __name__ == "__main__":
    sys.exit(main())

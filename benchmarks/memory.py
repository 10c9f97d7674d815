"""Memory on the default model: of one large training call, and of a worker after many runs.

    python benchmarks/memory.py [--no-bar] [--write] [--only train,runs]

`train_cpu_memory_32k`: the most that a process held during one forward-backward and optimizer step
over 24 datums of 1,024 tokens and one of 8,192 (rank 32, fp32), less what it held with the model
and the adapter loaded.
`worker_after_runs`: a server takes 42 runs of rank 32, one step each, and 107 snapshots that are
each sampled from; all clients but four leave. What the worker holds while the four go on (every
tensor by kind, as `/metrics` says, and its whole process), and at rest, five minutes later.

Takes about fifteen minutes on two cores; other load does not disturb it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "server")]
import report  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from train import datums, our_step, our_trainer  # noqa: E402

from tinkex import (  # noqa: E402
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from tinkex.engine.model import default_model  # noqa: E402

LENGTHS = [1024] * 24 + [8192]
NUM_RUNS, NUM_SNAPSHOTS, NUM_LEFT = 42, 107, 4
GIB = 2**30
REST_S = 600
"""A worker without work rests after five minutes."""


def peak_memory() -> report.Figure:
    """In a child, so that nothing but the training is measured."""
    command = [sys.executable, __file__, "--child"]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=7200)
    return report.Figure(
        name="train_cpu_memory_32k",
        ours=float(child.stdout),
        unit="GiB",
        bar=3.0,
        note=f"over the weights: {sum(LENGTHS):,} tokens in {len(LENGTHS)} datums, one call",
    )


def run_child() -> None:
    trainer = our_trainer(1)
    data = datums(LENGTHS, trainer.decoder.config.vocab_size)
    our_step(trainer, [datums([8], 100)], together=True)  # optimizer state and libraries
    # Not ru_maxrss: a child inherits its parent's.
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = resident_gib("VmRSS")
    our_step(trainer, [data], together=True)
    print(resident_gib("VmHWM") - before)


def resident_gib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 2**20


# ------------------------------------------------------------------------------------ many runs


def after_runs() -> list[report.Figure]:
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder)) as server:
        left = [use(server, number) for number in range(NUM_RUNS)][-NUM_LEFT:]
        for training, _ in left:
            step(training)
        time.sleep(15)  # the worker counts every ten seconds
        busy = held(server)
        rest = wait_for_rest(server)
        for _, service in left:
            service.close()
    print(f"busy {shown(busy)}\nat rest {shown(rest)}", file=sys.stderr)
    what = f"{NUM_RUNS} runs, {NUM_SNAPSHOTS} snapshots, {NUM_LEFT} left"
    return [
        report.Figure(name=name, ours=ours / GIB, unit="GiB", bar=bar, note=what)
        for name, ours, bar in (
            ("worker_after_runs", busy["process"], 4.0),
            ("worker_after_runs_at_rest", rest["process"], 2.5),
            ("worker_after_runs_snapshots", busy["snapshots"], 2.0),
            ("worker_after_runs_unaccounted", rest["process"] - tensors(rest), 1.0),
        )
    ]


def use(server: ServerProcess, number: int) -> tuple[TrainingClient, ServiceClient]:
    """One run: a step, its snapshots, a few tokens of each. All but the last few close."""
    service = ServiceClient(base_url=server.base_url)
    training = service.create_lora_training_client(default_model.NAME, rank=32, seed=number)
    step(training)
    for _ in range(2 + (number < NUM_SNAPSHOTS - 2 * NUM_RUNS)):
        sampler = training.save_weights_and_get_sampling_client()
        few = SamplingParams(max_tokens=4)
        sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, few).result()
    if number < NUM_RUNS - NUM_LEFT:
        service.close()
    print(f"run {number + 1}: {shown(held(server))}", file=sys.stderr)
    return training, service


def step(training: TrainingClient) -> None:
    tokens = list(range(100, 164))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 63}
    data = [Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)] * 4
    training.forward_backward(data, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=1e-4)).result()


def held(server: ServerProcess) -> dict[str, int]:
    """What the worker says of its memory, by kind."""
    text = httpx.get(f"{server.base_url}/metrics").text
    found = re.findall(r'tinkex_worker_memory_bytes\{kind="(\w+)",worker="[^"]*"\} (\S+)', text)
    return {kind: int(float(size_bytes)) for kind, size_bytes in found}


def tensors(sizes: dict[str, int]) -> int:
    return sum(size_bytes for kind, size_bytes in sizes.items() if kind != "process")


def wait_for_rest(server: ServerProcess) -> dict[str, int]:
    """At rest the packed copies are gone."""
    deadline = time.monotonic() + REST_S
    while held(server)["packed"] and time.monotonic() < deadline:
        time.sleep(5)
    time.sleep(5)  # the size of the process follows within seconds
    return held(server)


def shown(sizes: dict[str, int]) -> str:
    return ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in sizes.items()) + " GiB"


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", default="train,runs")
    wanted = parser.parse_known_args()[0].only.split(",")
    figures = [peak_memory()] if "train" in wanted else []
    return report.finish("memory", figures + (after_runs() if "runs" in wanted else []))


if __name__ == "__main__":
    if "--child" in sys.argv:
        run_child()
        sys.exit(0)
    sys.exit(main())

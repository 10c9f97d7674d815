"""What two trees of Tinkex cost for the same work: CPU time of client, API and worker, in turns.

    python dev/side_by_side.py OTHER_TREE [--turns 7] [--only train_small,heartbeat]

Only what both trees offer is used: their server's command line and their SDK. Each tree has a
server and a client of its own, and the two take turns, so that a busy machine slows both. CPU time
as the kernel's scheduler counts it; the figure is the median, over the turns, of ours / the
other's.

`requests` is the traffic of `benchmarks/server.py`: eight raw clients that submit and fetch; beside
CPU time it tells the wall time, which is what that benchmark's requests/s are made of.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
CLIENT = r"""
import json, sys
import numpy as np
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
url, engine = sys.argv[1:]
service = ServiceClient(base_url=url, api_key="tml-side")
offered = service.get_server_capabilities().supported_models  # each tree names its model itself
model = "toy" if engine == "toy" else offered[0].model_name
trainer = service.create_lora_training_client(model, rank=8, seed=1)
sampler = trainer.save_weights_and_get_sampling_client()
rng = np.random.default_rng(0)
def datum(length):
    tokens = rng.integers(1, 200, length)
    return Datum(ModelInput.from_ints(tokens.tolist()),
                 {"target_tokens": tokens, "weights": np.ones(length, np.float32)})
SMALL, LARGE, MIDDLE = [datum(64)], [datum(2048) for _ in range(64)], [datum(128) for _ in range(8)]
ADAM = AdamParams(learning_rate=1e-4)
def train(data, num_steps):
    for _ in range(num_steps):
        passed, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
        passed.result(), stepped.result()
def sample(num, length):
    params = SamplingParams(max_tokens=length, temperature=1.0, seed=1)
    prompt = ModelInput.from_ints(list(range(1, 65)))
    waiting = [sampler.sample(prompt, 1, params) for _ in range(num)]
    for each in waiting:
        each.result()
WORK = {
    "train_small": lambda: train(SMALL, 120),
    "train_large": lambda: train(LARGE, 3),
    "samples": lambda: [sample(400, 8) for _ in range(4)],
    "train_model": lambda: train(MIDDLE, 2),
    "sample_model": lambda: sample(16, 32),
}
print("ready", flush=True)
for line in sys.stdin:
    WORK[line.strip()]()
    print("done", flush=True)
"""
HEARTBEATS, REQUESTS = 400, 4000


@dataclass
class Side:
    tree: Path
    server: subprocess.Popen[bytes]
    port: int
    client: subprocess.Popen[str]

    def run(self, name: str) -> dict[str, float]:
        """CPU seconds of one piece of work, by process."""
        before = self._spent()
        if name == "heartbeat":
            _heartbeats(self.port)
        elif name == "requests":
            asyncio.run(_requests(self.port))
        else:
            assert self.client.stdin is not None
            assert self.client.stdout is not None
            self.client.stdin.write(f"{name}\n")
            self.client.stdin.flush()
            assert self.client.stdout.readline() == "done\n", f"the client of {self.tree} ended"
        after = self._spent()
        return {who: after[who] - before[who] for who in after}

    def _spent(self) -> dict[str, float]:
        workers = _children(self.server.pid)
        return {
            "client": _cpu_s(self.client.pid),
            "api": _cpu_s(self.server.pid),
            "worker": sum(map(_cpu_s, workers)),
            "wall": time.monotonic(),
        }


def _cpu_s(pid: int) -> float:
    """Of its living threads; a thread that ended is not counted, and none of ours does."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def _heartbeats(port: int) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"x-api-key": "tml-side", "content-type": "application/json"}

    def post(path: str, body: dict[str, object]) -> dict[str, str]:
        connection.request("POST", f"/api/v1/{path}", json.dumps(body), headers)
        answer: dict[str, str] = json.loads(connection.getresponse().read())
        return answer

    made = post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.36.0"})
    for _ in range(HEARTBEATS):
        post("session_heartbeat", {"session_id": made["session_id"]})
    connection.close()


async def _requests(port: int) -> None:
    from server import Clients  # the benchmark's, which needs what the tests need

    clients = await Clients(port).open()
    await clients.run(REQUESTS)
    clients.close()


@contextmanager
def opened(tree: Path, engine: list[str]) -> Iterator[Side]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TINK")}
    env |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--data-dir", folder]
        server = subprocess.Popen(
            [*command, *engine], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["base_url"]
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url, "toy" if "toy" in engine else "model"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n", f"the client of {tree} did not start"
            yield Side(tree, server, int(url.rpartition(":")[2]), client)
        finally:
            for child in (client, server):
                child.kill()
                child.wait()


def compare(other: Path, engine: list[str], names: list[str], turns: int) -> Iterator[str]:
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(opened(tree, engine)) for tree in (ROOT, other))
        for name in names:
            print(f"{name}, {turns} turns ...", file=sys.stderr, flush=True)
            for side in (ours, theirs):
                side.run(name)  # the first time pays for what is made once
            pairs = []
            for turn in range(turns):
                order: list[Side] = [ours, theirs] if turn % 2 else [theirs, ours]
                spent = {side.tree: side.run(name) for side in order}
                pairs.append((spent[ROOT], spent[other]))
            for who in ("client", "api", "worker", *(["wall"] if name == "requests" else [])):
                yield _line(f"{name} {who}", [(mine[who], old[who]) for mine, old in pairs])


def _line(name: str, pairs: list[tuple[float, float]]) -> str:
    mine, old = (statistics.median(column) for column in zip(*pairs, strict=True))
    if max(mine, old) < 0.02:
        return ""  # nothing to speak of: this process had no part in it
    ratios = sorted(a / b for a, b in pairs)
    middle = statistics.median(ratios)
    return (
        f"{name:24} {middle:6.2f}x   {mine * 1e3:8.1f} ms, the other {old * 1e3:8.1f} ms   "
        f"ratios {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=lambda text: Path(text).resolve())
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="names, separated by commas")
    args = parser.parse_args()
    plain = ["heartbeat", "requests", "train_small", "train_large", "samples"]
    for engine, names in (
        (["--engine", "toy"], plain),
        ([], ["train_model", "sample_model"]),
    ):
        if chosen := [name for name in names if not args.only or name in args.only.split(",")]:
            for line in compare(args.other, engine, chosen, args.turns):
                if line:
                    print(line, flush=True)


if __name__ == "__main__":
    main()

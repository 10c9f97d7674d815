"""One hostile key beside one polite key, and strangers without a key: what the polite one notices.

The attacks of `attackers.py` one after the other: queues flooded with long samples, large bodies,
bodies at `/v1` that are huge once parsed, other weights under the digest of a public checkpoint,
archives that are slow to read, sparse inputs that say they are gigabytes, traced losses of much
work, losses, weights and imports that fill the disk, connections that stay open, pages of very many
points, strangers.
Meanwhile the polite key sends heartbeats, samples eight tokens of its own checkpoint again and
again, greedily, and counts an answer that is not the first one as an error.

    python benchmarks/abuse.py [--no-bar] [--seconds 70] [--engine torch] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import orjson
import report
from attackers import (
    ATTACKS,
    HOSTILE,
    ROOT,
    Connection,
    Target,
    open_model,
    open_sampler,
    post,
    sample_body,
)

for _folder in ("harness", "chat"):
    sys.path.insert(0, str(ROOT / "tests" / _folder))
import chat_models  # noqa: E402
from fuzz import talking_toy  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from tiny_llama import tiny_llama  # noqa: E402

from tinkex.wire import tinker_public_pb2 as pb  # noqa: E402

POLITE = "tml-polite"
GIB = 1024**3
PROTO = "application/x-protobuf"


def memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


class Watched:
    """Latencies and failures of the polite key, and the most memory the API process took."""

    def __init__(self) -> None:
        self.heartbeats_s: list[float] = []
        self.samples_s: list[float] = []
        self.errors: list[str] = []
        self.attack = "none"
        """The attack under way."""
        self.longest_s: dict[str, float] = {}
        """The longest sample during each attack."""
        self.memory_bytes: dict[str, int] = {}
        """The most memory of the API process during each attack."""


async def published_checkpoint(port: int) -> str:
    """The path of a checkpoint of the polite key that everybody may read."""
    connection = Connection(port, POLITE)
    _, model = await open_model(connection)
    body = {"model_id": model, "seq_id": 1, "path": "hers", "overwrite": False}
    saved = await connection.settled(await post(connection, "save_weights", body))
    path = str(orjson.loads(saved)["path"])
    run, rest = path.removeprefix("tinker://").split("/", 1)
    status, content = await connection.post(
        f"/api/v1/training_runs/{run}/checkpoints/{rest}/publish", {}
    )
    assert status in (200, 204), content
    connection.close()
    return path


async def be_polite(port: int, path: str, watched: Watched, until: float) -> None:
    beats, samples = Connection(port, POLITE), Connection(port, POLITE)
    session, sampler = await open_sampler(samples, model_path=path)
    answers: dict[int, bytes] = {}

    async def beat() -> None:
        while time.monotonic() < until:
            started = time.perf_counter()
            await post(beats, "session_heartbeat", {"session_id": session})
            watched.heartbeats_s.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)

    async def sample() -> None:
        number = 0
        while time.monotonic() < until:
            number += 1
            started, prompt = time.perf_counter(), number % 20
            body = sample_body(
                sampler,
                number,
                num_samples=1,
                max_tokens=8,
                prompt=list(range(10 + 3 * prompt, 28 + 3 * prompt)),
                temperature=0.0,
            )
            told = await samples.settled(await post(samples, "asample", body), accept=PROTO)
            watched.samples_s.append(time.perf_counter() - started)
            tokens = tokens_of(told)
            if answers.setdefault(prompt, tokens) != tokens:
                raise RuntimeError(f"another answer to prompt {prompt}")
            await asyncio.sleep(0.05)

    for done in await asyncio.gather(beat(), sample(), return_exceptions=True):
        if isinstance(done, Exception):
            watched.errors.append(repr(done))


def tokens_of(content: bytes) -> bytes:
    (sequence,) = pb.SampleResponse.FromString(content).sequences
    return bytes(sequence.tokens)


async def watch_memory(pid: int, watched: Watched, until: float) -> None:
    while time.monotonic() < until:
        most = watched.memory_bytes.get(watched.attack, 0)
        watched.memory_bytes[watched.attack] = max(most, memory_bytes(pid))
        await asyncio.sleep(0.1)


async def abuse(server: ServerProcess, seconds: float, names: list[str]) -> Watched:
    path = await published_checkpoint(server.port)
    watched, started = Watched(), time.monotonic()
    end, each_s = started + seconds, seconds / len(names)
    polite = asyncio.create_task(be_polite(server.port, path, watched, end))
    memory = asyncio.create_task(watch_memory(server.pid, watched, end))
    target = Target(server.port, HOSTILE, path)
    for number, name in enumerate(names):
        watched.attack, before = name, len(watched.samples_s)
        await ATTACKS[name](target, started + (number + 1) * each_s)
        watched.longest_s[name] = max(watched.samples_s[before:], default=each_s)
    await asyncio.gather(polite, memory)
    return watched


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 2 else max(values, default=99)


def settings(folder: Path, engine: str) -> list[str]:
    """Flags of a server whose model reads and writes words, computed by torch or by the toy."""
    toy = talking_toy(folder)
    if engine == "torch":
        vocab_size = chat_models.tokenizer(chat_models.QWEN3).vocab_size
        shape = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4096}
        tiny_llama(folder, vocab_size=vocab_size, **shape)
    # Deterministic: an answer that differs must be somebody's doing, not a rounding.
    exact = ["--engine", "torch", "--device", "cpu", "--deterministic"]
    kind = exact if engine == "torch" else []
    kind = kind or ["--engine", toy["engine"]]
    return [*kind, "--model", str(folder), "--alias", f"toy={folder}"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--engine", choices=("toy", "torch"), default="toy")
    parser.add_argument("--only", action="append", choices=list(ATTACKS))
    flags, rest = parser.parse_known_args()
    names: list[str] = flags.only or list(ATTACKS)
    with tempfile.TemporaryDirectory() as folder:
        keys = ("--api-key", f"{HOSTILE}=hostile", "--api-key", f"{POLITE}=polite")
        how = settings(Path(folder, "model"), flags.engine)
        with ServerProcess(Path(folder), *how, *keys) as server:
            watched = asyncio.run(abuse(server, flags.seconds, names))
    for error in watched.errors:
        print(error, file=sys.stderr)
    longest = ", ".join(f"{name} {seconds:.2f}" for name, seconds in watched.longest_s.items())
    most = ", ".join(f"{name} {size >> 20}" for name, size in watched.memory_bytes.items())
    print(f"longest sample by attack, in s: {longest}", file=sys.stderr)
    print(f"most memory of the API process by attack, in MiB: {most}", file=sys.stderr)
    if flags.engine == "toy":
        return report.finish("abuse", figures(watched), rest)
    command = "python benchmarks/abuse.py --engine torch"
    return report.finish("abuse_torch", figures(watched), rest, command=command)


def figures(watched: Watched) -> list[report.Figure]:
    count = f"{len(watched.heartbeats_s)} heartbeats, {len(watched.samples_s)} samples"
    beats_s, samples_s = p99(watched.heartbeats_s), p99(watched.samples_s)
    memory = max(watched.memory_bytes.values()) / GIB
    return [
        report.Figure(name="polite_heartbeat_p99", ours=beats_s, unit="s", bar=0.5),
        report.Figure(name="polite_sample_p99", ours=samples_s, unit="s", bar=5.0, note=count),
        report.Figure(name="api_memory", ours=memory, unit="GiB", bar=1.0),
        report.Figure(name="polite_errors", ours=len(watched.errors), unit="errors", bar=0),
    ]


if __name__ == "__main__":
    sys.exit(main())

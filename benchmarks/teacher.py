"""A step of on-policy distillation with the teacher on the server, against two calls, taking turns.

    python benchmarks/teacher.py [--no-bar] [--write] [--repeats 7] [--only tiny,default]
    python benchmarks/teacher.py --only tiny,folder --device cuda [--model FOLDER]

A step learns from answers that are sampled already: 32 prompt tokens and 32 sampled ones each, new
every time. In two calls a sampling client asks the teacher for the logprobs of every answer, makes
advantages of them and sends these; in one call the server asks the teacher. Both end with an
optimizer step. `teacher_tiny`: 64 answers on a random model of two layers, where calls cost most;
`teacher_client_cpu`: what that takes of the client's process. `teacher_smollm2`: 8 answers on the
default model. The arithmetic of fresh data is the same either way: one call saves the trip.
`teacher_*_again`: the same data as in the step before, as in a second epoch over a data set: the
server remembers what the teacher said. `teacher_folder`: 64 answers of 256+256 tokens on the model
of `--model`; without one, on random weights of Qwen3-1.7B's shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("server", "harness")]
from server_process import ServerProcess  # noqa: E402
from tiny_llama import tiny_llama  # noqa: E402

import tinkex  # noqa: E402
from tinkex.engine.model import default_model  # noqa: E402

PROMPT, ANSWER = 32, 32
ADAM = tinkex.AdamParams(learning_rate=1e-5)
Tokens = list[list[int]]


@dataclass
class Lesson:
    """A student and its teacher, the base model itself."""

    training: tinkex.TrainingClient
    sampler: tinkex.SamplingClient
    base: str
    vocab_size: int
    num_answers: int
    rng: np.random.Generator
    prompt: int = PROMPT
    answer: int = ANSWER

    def answers(self) -> Tokens:
        shape = self.num_answers, self.prompt + self.answer
        return [row.tolist() for row in self.rng.integers(3, self.vocab_size, shape)]

    def row(self, before: float, values: list[float]) -> list[float]:
        return [before] * (self.prompt - 1) + values

    def data(self, answers: Tokens, **inputs: list[list[float]]) -> list[tinkex.Datum]:
        q = self.row(0.0, [-2.0] * self.answer)
        return [
            tinkex.Datum(
                tinkex.ModelInput.from_ints(tokens[:-1]),
                {
                    "target_tokens": tokens[1:],
                    "logprobs": q,
                    **{name: rows[i] for name, rows in inputs.items()},
                },
            )
            for i, tokens in enumerate(answers)
        ]

    def one_call(self, answers: Tokens) -> None:
        weights = [self.row(0.0, [1.0] * self.answer)] * len(answers)
        data = self.data(answers, weights=weights)
        done = self.training.forward_backward(data, "importance_sampling", teacher=self.base)
        step = self.training.optim_step(ADAM)
        done.result()
        step.result()

    def two_calls(self, answers: Tokens) -> None:
        asked = [
            self.sampler.compute_logprobs(tinkex.ModelInput.from_ints(tokens)) for tokens in answers
        ]
        scores = [future.result()[self.prompt :] for future in asked]
        gaps = [[-2.0 - (t or 0.0) for t in row] for row in scores]
        mean = statistics.fmean(gap for row in gaps for gap in row)
        advantages = [self.row(0.0, [mean - gap for gap in row]) for row in gaps]
        data = self.data(answers, advantages=advantages)
        done = self.training.forward_backward(data, "importance_sampling")
        step = self.training.optim_step(ADAM)
        done.result()
        step.result()


@contextmanager
def lesson(
    base: str, vocab_size: int, num_answers: int, *lengths: int, device: str
) -> Iterator[Lesson]:
    flags = ("--engine", "torch", "--device", device, "--model", base)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(Path(folder), *flags, one_thread=False) as server,
        tinkex.ServiceClient(base_url=server.base_url, api_key="tml-bench") as service,
    ):
        training = service.create_lora_training_client(base, rank=8, seed=0).result()
        sampler = service.create_sampling_client(base_model=base).result()
        rng = np.random.default_rng(0)
        yield Lesson(training, sampler, base, vocab_size, num_answers, rng, *lengths)


Clock = Callable[[], float]


def rounds(
    taught: Lesson, repeats: int, clock: Clock, *, again: bool = False
) -> tuple[float, float]:
    """The medians of a step in one call and in two; `again`: each with the same data throughout."""
    ways = (taught.one_call, taught.two_calls)
    same = [taught.answers() for _ in ways]
    spent: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for i, way in enumerate(ways):
            answers = same[i] if again else taught.answers()
            began = clock()
            way(answers)
            if number:  # the first of each is a warm-up
                spent[i].append(clock() - began)
    return statistics.median(spent[0]), statistics.median(spent[1])


def tiny(repeats: int, device: str) -> Iterator[report.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama(Path(folder) / "tiny")
        with lesson(str(Path(folder) / "tiny"), 97, 64, device=device) as taught:
            one, two = rounds(taught, 3 * repeats, time.perf_counter)
            note = f"64 answers of {PROMPT}+{ANSWER} tokens, two layers of 32"
            yield report.Figure(
                name="teacher_tiny", ours=one * 1e3, peer=two * 1e3, unit="ms", bar=1.3, note=note
            )
            one, two = rounds(taught, 3 * repeats, time.perf_counter, again=True)
            yield report.Figure(
                name="teacher_tiny_again", ours=one * 1e3, peer=two * 1e3, unit="ms", bar=1.3
            )
            one, two = rounds(taught, 3 * repeats, time.process_time)
            yield report.Figure(
                name="teacher_client_cpu", ours=one * 1e3, peer=two * 1e3, unit="ms", bar=1.3
            )


def default(repeats: int, device: str) -> Iterator[report.Figure]:
    default_model.folder()
    with lesson(default_model.NAME, 49_152, 8, device=device) as taught:
        one, two = rounds(taught, repeats, time.perf_counter)
        note = f"8 answers of {PROMPT}+{ANSWER} tokens"
        yield report.Figure(
            name="teacher_smollm2", ours=one, peer=two, unit="s", bar=1.3, note=note
        )
        one, two = rounds(taught, repeats, time.perf_counter, again=True)
        yield report.Figure(name="teacher_smollm2_again", ours=one, peer=two, unit="s", bar=1.0)


def folder(repeats: int, device: str, model: str | None) -> Iterator[report.Figure]:
    if model is None:
        import gpu_server

        with gpu_server.random_model("1.7b") as written:
            yield from folder(repeats, device, str(written))
        return
    vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    with lesson(model, vocab_size, 64, 256, 256, device=device) as taught:
        one, two = rounds(taught, repeats, time.perf_counter)
        note = f"64 answers of 256+256 tokens, {device}"
        yield report.Figure(name="teacher_folder", ours=one, peer=two, unit="s", bar=1.3, note=note)
        one, two = rounds(taught, repeats, time.perf_counter, again=True)
        yield report.Figure(name="teacher_folder_again", ours=one, peer=two, unit="s", bar=1.3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="tiny,default", help="which figures, by comma")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", help="the model folder of `--only folder`")
    options, _ = parser.parse_known_args()
    measures: dict[str, Callable[[], Iterable[report.Figure]]] = {
        "tiny": lambda: tiny(options.repeats, options.device),
        "default": lambda: default(options.repeats, options.device),
        "folder": lambda: folder(options.repeats, options.device, options.model),
    }
    figures = [figure for name in options.only.split(",") for figure in measures[name]()]
    return report.finish("teacher", figures)


if __name__ == "__main__":
    sys.exit(main())

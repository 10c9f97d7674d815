"""What it costs two members to add up a gradient: through files, and in a meeting over gloo.

    python dev/gradient_exchange.py [--megabytes 700]

These are the two ways of a pool (`server/workers/gradient_exchange.py`): each member writes what it
gathered, then maps the others' files and adds all in one order; or they swap slices of it. Says
seconds, and CPU seconds of the member that took more, which say more on a machine with other work.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinkex.engine.collectives.process_group import join
from tinkex.engine.exchange import gradient_file
from tinkex.engine.exchange.reduction import reduce

ROUNDS = 3


def timed(barrier: Barrier, work: Callable[[], Any]) -> tuple[float, float]:
    barrier.wait()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    barrier.wait()
    return time.perf_counter() - began, time.process_time() - cpu


def member(rank: int, num_values: int, folder: str, barrier: Barrier, answers: Any) -> None:
    torch.set_num_threads(1)
    meeting = join(rank, 2, torch.device("cpu"), f"file:{folder}/store", timeout_s=600)
    grad = torch.full((num_values,), rank + 1.0)
    sums: list[torch.Tensor] = []

    def write() -> None:
        gradient_file.write(f"{folder}/{rank}.grad", {"0": grad.numpy()})

    def add() -> None:
        own = sums.pop()  # as the trainer, which keeps what it wrote
        for other in range(2):
            read = {} if other == rank else gradient_file.read(f"{folder}/{other}.grad")
            for part in [own] if other == rank else map(torch.from_numpy, read.values()):
                sums.append(part) if not sums else sums[0].add_(part)

    def swap() -> None:
        total = reduce(meeting, {rank: sums[0]}, grad)
        assert total is not None
        sums[0] = total

    for _ in range(ROUNDS):
        rows = [("write", *timed(barrier, write))]
        for name, work in (("read and add", add), ("a meeting over gloo", swap)):
            sums[:] = [grad.clone()]
            rows.append((name, *timed(barrier, work)))
            assert float(sums[0][-1]) == 3.0
        answers.put((rank, rows))
    meeting.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=700)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        about = (options.megabytes * 250_000, folder, barrier, answers)
        members = [context.Process(target=member, args=(rank, *about)) for rank in range(2)]
        for one in members:
            one.start()
        told = [answers.get() for _ in range(2 * ROUNDS)]
        for one in members:
            one.join()
        assert not list(Path(folder).glob("*.part"))
    print(f"{options.megabytes} MB, two members of one thread, best of {ROUNDS}")
    print("| | seconds | CPU seconds |\n|---|---|---|")
    for place, (name, _, _) in enumerate(told[0][1]):
        best = [
            np.array([rows[place][1:] for rank, rows in told if rank == wanted]).min(axis=0)
            for wanted in range(2)
        ]
        seconds, cpu_s = np.max(best, axis=0)
        print(f"| {name} | {seconds:.2f} | {cpu_s:.2f} |")


if __name__ == "__main__":
    main()

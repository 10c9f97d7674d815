"""Peak memory of training on the default model: one call with 32k tokens.

    python benchmarks/memory.py [--no-bar] [--write]

`train_cpu_memory_32k`: the most that a process held during one forward-backward and optimizer step
over 24 datums of 1,024 tokens and one of 8,192 (rank 32, fp32), less what it held with the model
and the adapter loaded. Takes about five minutes on two cores; other load does not disturb it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import report
from train import datums, our_step, our_trainer

LENGTHS = [1024] * 24 + [8192]


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


if __name__ == "__main__":
    if "--child" in sys.argv:
        run_child()
        sys.exit(0)
    sys.exit(report.finish("memory", [peak_memory()]))

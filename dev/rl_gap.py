"""RL on sums with and without a gap between sampler and trainer, on one GPU: does it matter?

    python dev/rl_gap.py [--seeds 5] [--steps 24] [--write FILE.json] [--plot FILE.png]
    python dev/rl_gap.py --read FILE.json --plot FILE.png

The recipe of `tinkex train rl` on the default model, through server and SDK. The second server runs
with `dev/with_gap` on its path, which brings the old gap back; all else is equal. All seeds of a
server train at once, as tenants.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import gpu_server  # noqa: E402
import grpo_sums  # noqa: E402

import tinkex  # noqa: E402
from tinkex.contract.models import DEFAULT_MODEL  # noqa: E402
from tinkex.recipes import rl  # noqa: E402

SHOWN = ("reward", "kl", "sampler_gap_mean", "sampler_gap_max", "sampler_gap_k3")


@contextlib.contextmanager
def serving(with_gap: bool, flags: list[str]) -> Iterator[str]:
    before = os.environ.get("PYTHONPATH", "")
    if with_gap:
        path = [str(ROOT / "dev" / "with_gap"), before]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            gpu_server.serving(DEFAULT_MODEL, Path(folder), flags) as base_url,
        ):
            yield base_url
    finally:
        os.environ["PYTHONPATH"] = before


def curve(base_url: str, seed: int, steps: int) -> list[dict[str, float]]:
    seen: list[dict[str, float]] = []

    def on_step(step: int, num_steps: int, metrics: dict[str, float]) -> None:
        seen.append({name: metrics[name] for name in SHOWN if name in metrics})

    with (
        tempfile.TemporaryDirectory() as folder,
        tinkex.ServiceClient(base_url=base_url) as service,
    ):
        config = rl.RlConfig(
            log_dir=folder, rank=16, steps=steps, prompts_per_step=8, group_size=16, max_tokens=12,
            kl_to="base", seed=seed, eval_share=0.25, eval_every=1000,
        )  # fmt: skip
        result = rl.train(
            config, service, grpo_sums.reward, grpo_sums.prompts(), on_step, lambda note: None
        )
        seen.append({"held_out_reward": result.metrics["held_out_reward"]})
    return seen


def show(name: str, curves: list[list[dict[str, float]]]) -> None:
    print(f"\n{name}: mean over {len(curves)} seeds (standard deviation)")
    steps = len(curves[0]) - 1
    for step in sorted({0, steps // 8, steps // 4, steps // 2, 3 * steps // 4, steps - 1}):
        parts = []
        for metric in SHOWN:
            values = [one[step][metric] for one in curves if metric in one[step]]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                parts.append(f"{metric} {statistics.fmean(values):.3g} ({spread:.2g})")
        print(f"  step {step + 1:3d}  " + "  ".join(parts))
    ends = [one[-1]["held_out_reward"] for one in curves]
    print("  held-out sums, greedy:", " ".join(f"{end:.2f}" for end in ends))


def draw(found: dict[str, list[list[dict[str, float]]]], file: Path) -> None:
    """Each seed thin, their mean thick."""
    from matplotlib.figure import Figure

    labels = {
        "reward": "mean reward",
        "kl": "KL to the base, nats per token",
        "sampler_gap_mean": "sampler-trainer gap, nats per token",
    }
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, 3), labels.items(), strict=True):
        for number, (name, curves) in enumerate(found.items()):
            # A step whose groups all agree trains nothing, and measures no gap.
            lines = [[step.get(metric, math.nan) for step in one[:-1]] for one in curves]
            steps = range(1, len(lines[0]) + 1)
            for line in lines:
                axes.plot(steps, line, color=f"C{number}", linewidth=0.6, alpha=0.5)
            known = [[v for v in values if v == v] for values in zip(*lines, strict=True)]
            means = [statistics.fmean(values) if values else math.nan for values in known]
            axes.plot(steps, means, color=f"C{number}", linewidth=2.2, label=name)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--flags", default="", help="more flags of the server")
    parser.add_argument("--write", type=Path, help="all curves as JSON")
    parser.add_argument("--read", type=Path, help="curves that were written before")
    parser.add_argument("--plot", type=Path, help="draw them")
    options = parser.parse_args()
    found = json.loads(options.read.read_text()) if options.read else run_both(options)
    for name, curves in found.items():
        show(name, curves)
    if options.plot:
        draw(found, options.plot)


def run_both(options: argparse.Namespace) -> dict[str, list[list[dict[str, float]]]]:
    os.environ["TINKER_API_KEY"] = "tml-rl-gap"
    found = {}
    for name, with_gap in (("zero gap", False), ("with a gap", True)):
        with serving(with_gap, options.flags.split()) as base_url:
            with ThreadPoolExecutor(options.seeds) as pool:
                runs = [
                    pool.submit(curve, base_url, seed, options.steps)
                    for seed in range(options.seeds)
                ]
                found[name] = [run.result() for run in runs]
        if options.write:
            options.write.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    main()

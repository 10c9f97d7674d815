"""Reinforcement learning on sums: reward 1 for the right number, 0 for anything else.

python examples/grpo_sums.py        # two to three minutes on two CPU cores
tinkex train rl examples/grpo_sums.py:reward --steps 20 --max-tokens 12   # the same recipe
"""

import random
import re
import statistics
import tempfile

import tinkex
from tinkex.recipes import rl


def prompts():
    """Sums of two digits. Only their number is told to the reward, not how to find it."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b}
        for a, b in pairs
    ]


def reward(completion, row):
    """One point when the last number of the answer is the sum."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == row["answer"])


def main():
    rewards = []

    def on_step(step, num_steps, metrics):
        rewards.append(metrics["reward"])
        print(
            f"step {step}  reward {metrics['reward']:.2f}  entropy {metrics['entropy']:.2f}  "
            f"KL to the base {metrics['kl']:.4f}"
        )

    with tempfile.TemporaryDirectory() as folder, tinkex.ServiceClient() as service:
        config = rl.RlConfig(
            log_dir=folder,
            rank=16,
            steps=16,
            prompts_per_step=4,
            group_size=8,
            max_tokens=12,
            kl_to="base",
            eval_share=0.25,
            eval_every=100,
        )
        result = rl.train(config, service, reward, prompts(), on_step)
    first, last = statistics.fmean(rewards[:4]), statistics.fmean(rewards[-4:])
    print(f"\nmean reward {first:.2f} -> {last:.2f}; on sums it never trained on, greedy:")
    print(f"  {result.metrics['held_out_reward']:.0%} right")
    assert last > first + 0.2


if __name__ == "__main__":
    main()

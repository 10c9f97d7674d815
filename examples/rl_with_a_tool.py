"""RL with a tool: the model learns to call a calculator instead of guessing.

An environment answers back. Here it looks for `CALC 12 * 34` in an answer, computes it, and replies
with the result; the model's next answer is then judged.

python examples/rl_with_a_tool.py        # two to four minutes on two CPU cores
"""

import random
import re
import statistics
import tempfile

import tinkex
from tinkex.recipes import rl
from tinkex.recipes.episodes import Turn

SHOWN = [
    {"role": "user", "content": "What is 52 + 31?"},
    {"role": "assistant", "content": "CALC 52 + 31"},
    {"role": "user", "content": "The result is 83. So, what is 52 + 31?"},
    {"role": "assistant", "content": "83"},
]


def prompts():
    draw = random.Random(0)
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(60)]
    return [{"prompt": f"What is {a} + {b}?", "a": a, "b": b} for a, b in pairs]


class Calculator:
    """Half a point for a call that computes the right thing, the rest for passing it on.

    One example of a call stands before each question; the model has to make a habit of it.
    """

    def __init__(self, row):
        self.row, self.called = row, False

    def start(self):
        return [*SHOWN, {"role": "user", "content": self.row["prompt"]}]

    def step(self, answer):
        a, b = self.row["a"], self.row["b"]
        if self.called:
            return Turn(reward=0.5 * (str(a + b) in answer))
        call = re.search(r"CALC (\d+) \+ (\d+)", answer)
        if call is None:
            return Turn(reward=0.0)
        self.called = True
        right = {int(call[1]), int(call[2])} == {a, b}
        result = int(call[1]) + int(call[2])
        return Turn(reward=0.5 * right, reply=f"The result is {result}. So, what is {a} + {b}?")


def main():
    history = []

    def on_step(step, num_steps, metrics):
        history.append(metrics)
        print(f"step {step}  reward {metrics['reward']:.2f}  turns {metrics['turns']:.2f}")

    with tempfile.TemporaryDirectory() as folder, tinkex.ServiceClient() as service:
        config = rl.RlConfig(
            log_dir=folder,
            rank=16,
            learning_rate=5e-4,
            steps=8,
            prompts_per_step=3,
            group_size=8,
            max_tokens=16,
            max_turns=2,
            eval_share=0.0,
        )
        rl.train(config, service, Calculator, prompts(), on_step)
    first, last = (
        {name: statistics.fmean(m[name] for m in part) for name in ("reward", "turns")}
        for part in (history[:2], history[-2:])
    )
    print(f"\nreward {first['reward']:.2f} -> {last['reward']:.2f}")
    print(f"answers with a call {first['turns'] - 1:.0%} -> {last['turns'] - 1:.0%}")
    assert last["reward"] > first["reward"] + 0.15


if __name__ == "__main__":
    main()

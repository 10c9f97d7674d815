"""A game of several turns: guess a number, and learn to listen to "higher" and "lower".

python examples/multi_turn_game.py        # two to four minutes on two CPU cores
"""

import re
import statistics
import tempfile

import tinkex
from tinkex.recipes import rl
from tinkex.recipes.episodes import Turn

SHOWN = [
    {"role": "user", "content": "I think of a number from 1 to 9. Guess it."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Higher!"},
    {"role": "assistant", "content": "7"},
]
AGAIN = "Right! I think of a new number from 1 to 9. Guess it."


def prompts():
    return [{"prompt": AGAIN, "secret": secret} for secret in range(1, 10)]


class HigherLower:
    """Four guesses. A point for the number, less a quarter for every guess before it."""

    def __init__(self, row):
        self.secret, self.guesses = row["secret"], 0

    def start(self):
        return [*SHOWN, {"role": "user", "content": AGAIN}]

    def step(self, answer):
        self.guesses += 1
        numbers = re.findall(r"\d+", answer)
        if len(numbers) != 1:  # no number, or many at once
            return Turn(reward=-0.25)
        guess = int(numbers[0])
        if guess == self.secret:
            return Turn(reward=1.25 - 0.25 * self.guesses)
        if self.guesses == 4:
            return Turn(reward=0.0)
        return Turn(reply="Higher!" if guess < self.secret else "Lower!")


def main():
    history = []

    def on_step(step, num_steps, metrics):
        history.append(metrics["reward"])
        print(f"step {step}  reward {metrics['reward']:+.2f}  turns {metrics['turns']:.1f}")

    with tempfile.TemporaryDirectory() as folder, tinkex.ServiceClient() as service:
        config = rl.RlConfig(
            log_dir=folder,
            rank=16,
            learning_rate=5e-4,
            steps=10,
            prompts_per_step=3,
            group_size=8,
            max_tokens=6,
            max_turns=4,
            eval_share=0.0,
        )
        rl.train(config, service, HigherLower, prompts(), on_step)
    first, last = statistics.fmean(history[:3]), statistics.fmean(history[-3:])
    print(f"\nmean reward {first:+.2f} -> {last:+.2f}")
    assert last > first + 0.1


if __name__ == "__main__":
    main()

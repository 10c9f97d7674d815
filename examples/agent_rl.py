"""Train an agent written with the plain `openai` client, on the exact tokens it saw and made.

    python examples/agent_rl.py [BASE_URL]

The game: find a number from 1 to 9 in three turns; after each guess the player hears `Higher` or
`Lower`. The agent below knows nothing of training. Its calls carry a trajectory id, the server
records their tokens and logprobs, and `service.trajectories(id)` gives them back as datums. Without
BASE_URL a server of your own starts. Needs `pip install openai`.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import sys

from openai import AsyncOpenAI

import tinkex

NUM_STEPS, NUM_GAMES, NUM_TURNS = 10, 36, 3
LEARNING_RATE = 1e-3
RULES = "I think of a number from 1 to 9. What is it?"


async def play(client: AsyncOpenAI, model: str, game_id: str, secret: int) -> float:
    """One game. Finding the number is worth 1; a turn with any guess at all, 0.2."""
    messages = [{"role": "user", "content": RULES}]
    reward = 0.0
    for _ in range(NUM_TURNS):
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=5, extra_body={"trajectory": game_id}
        )
        said = answer.choices[0].message.content or ""
        guess = re.search(r"\b[1-9]\b", said)
        if guess is None:
            hint = "Say a number."
        elif int(guess[0]) == secret:
            return 1.0
        else:
            hint = "Higher." if secret > int(guess[0]) else "Lower."
            reward += 0.2
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return reward


async def play_all(client: AsyncOpenAI, model: str, step: int) -> dict[str, float]:
    """Rewards by game id; every digit is the secret equally often."""
    secrets = [1 + n % 9 for n in range(NUM_GAMES)]
    games = {f"digits-{step}-{n}-{random.getrandbits(32):x}": s for n, s in enumerate(secrets)}
    rewards = await asyncio.gather(*(play(client, model, g, s) for g, s in games.items()))
    return dict(zip(games, rewards, strict=True))


def main(base_url: str | None = None) -> list[float]:
    """Train; gives the mean reward of each step."""
    service = tinkex.ServiceClient(base_url=base_url)
    training = service.create_lora_training_client(
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct", rank=16, seed=0
    ).result()
    curve: list[float] = []
    for step in range(NUM_STEPS):
        model = training.save_weights_for_sampler(f"step-{step}").result().path

        async def games(model: str = model, step: int = step) -> dict[str, float]:
            async with AsyncOpenAI(**service.openai_options(), timeout=600) as client:
                return await play_all(client, model, step)

        rewards = asyncio.run(games())
        mean = statistics.mean(rewards.values())
        recorded = {game: service.trajectories(game) for game in rewards}
        datums = [
            datum
            for game, trajectory in recorded.items()
            for datum in trajectory.result().to_datums(reward=rewards[game] - mean)
        ]
        result = training.forward_backward(datums, "importance_sampling")
        training.optim_step(tinkex.AdamParams(learning_rate=LEARNING_RATE)).result()
        gap = result.result().metrics["sampler_gap_max:max"]
        print(f"step {step:2}  reward {mean:.3f}  largest |log ratio| {gap:.1e}", flush=True)
        # What is trained is what was sampled: the importance ratio is 1, to rounding.
        assert gap < 1e-4, gap
        curve.append(mean)
    service.close().result()
    return curve


if __name__ == "__main__":
    rewards = main(*sys.argv[1:2])
    first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-3:])
    print(f"mean reward of the first three steps {first:.3f}, of the last three {last:.3f}")
    assert last > first + 0.15, "the agent did not learn"

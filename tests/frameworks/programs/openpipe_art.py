"""OpenPipe ART, its Tinker backend: roll out by the OpenAI client it lends, train, go on later."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "peers"))
import art
from art.tinker_native import TinkerNativeBackend
from steps import check, main_of_async

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
MESSAGES = [{"role": "user", "content": "Say yes."}]
STEPS = ("register", "rollout", "train", "rollout_of_the_new_step", "resume", "close")


class Art:
    async def register(self) -> str:
        self.backend = TinkerNativeBackend(path="art")
        self.model = art.TrainableModel(name="agent", project="peers", base_model=MODEL)
        await self.model.register(
            self.backend, _openai_client_config={"server_args": {"host": "127.0.0.1"}}
        )
        return str(await self.model.get_step())

    async def rollout(self) -> str:
        self.groups = [await self._group() for _ in range(2)]
        return f"{sum(len(group.trajectories) for group in self.groups)} trajectories"

    async def _group(self) -> art.TrajectoryGroup:
        client, name = self.model.openai_client(), self.model.get_inference_name()
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=name, messages=MESSAGES, max_completion_tokens=8
                )
                for _ in range(3)
            )
        )
        return art.TrajectoryGroup(
            art.Trajectory(
                messages_and_choices=[*MESSAGES, answer.choices[0]], reward=float(reward)
            )
            for reward, answer in enumerate(answers)
        )

    async def train(self) -> str:
        losses = []
        for loss_fn in ("cispo", "ppo", "importance_sampling"):
            result = await self.backend.train(
                self.model, self.groups, loss_fn=loss_fn, learning_rate=1e-3, save_checkpoint=True
            )
            losses.append(result.metrics["loss:sum"])
        check(await self.model.get_step() == 3, "three trainings are three steps")
        return f"{losses}"

    async def rollout_of_the_new_step(self) -> str:
        check(self.model.get_inference_name().endswith("@3"), self.model.get_inference_name())
        group = await self._group()
        return f"{len(group.trajectories)} trajectories"

    async def resume(self) -> str:
        """A new backend over the same folder goes on at the saved step."""
        backend = TinkerNativeBackend(path="art")
        model = art.TrainableModel(name="agent", project="peers", base_model=MODEL)
        await model.register(backend, _openai_client_config={"server_args": {"host": "127.0.0.1"}})
        step = await model.get_step()
        check(step == 3, f"resumed at step {step}")
        result = await backend.train(model, self.groups, learning_rate=1e-3)
        await backend.close()
        return f"step {result.step}"

    async def close(self) -> None:
        await self.backend.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main_of_async(Art(), STEPS)))

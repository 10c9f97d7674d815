"""Mind Lab Toolkit (MinT): its own names for Tinker's settings and clients, and its two calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "peers"))
import mint
from mint import types
from mint.mint import ReverseKLDatum, forward_backward_reverse_kl, interpolate_checkpoints
from steps import NotInThisVersion, check, main_of

MODEL = os.environ["FRAMEWORK_MODEL"]
TOKENS = [11, 23, 35, 47, 59, 71]
STEPS = ("connect", "train", "sample", "reverse_kl", "interpolate")


def tensor(values: list, dtype: str) -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def own(call: Callable, *args: object, **named: object) -> object:
    """One of MinT's calls, which a Tinker server need not have."""
    try:
        return call(*args, **named)
    except mint.NotFoundError as exc:
        if "/mint/" in str(exc.request.url):
            raise NotInThisVersion("the server has no such call") from exc
        raise


class Mint:
    def connect(self) -> str:
        self.service = mint.ServiceClient()
        self.client = self.service.create_lora_training_client(base_model=MODEL, rank=8)
        return self.client.model_id

    def train(self) -> str:
        inputs = {
            "target_tokens": tensor(TOKENS[1:], "int64"),
            "weights": tensor([1.0] * 5, "float32"),
        }
        data = [
            types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
        ]
        losses = []
        for _ in range(3):
            future = self.client.forward_backward(data, "cross_entropy")
            self.client.optim_step(types.AdamParams(learning_rate=0.02)).result()
            losses.append(future.result().metrics["loss:sum"])
        check(losses[-1] < losses[0], f"{losses}")
        return f"{losses[0]:.2f} -> {losses[-1]:.2f}"

    def sample(self) -> str:
        self.path = self.client.save_weights_for_sampler("mint").result().path
        sampler = self.service.create_sampling_client(model_path=self.path)
        prompt, params = types.ModelInput.from_ints(TOKENS[:3]), types.SamplingParams(max_tokens=4)
        sequence = sampler.sample(prompt, 1, params).result().sequences[0]
        check(1 <= len(sequence.tokens) <= 4, f"{sequence}")  # it may end early
        return f"{sequence.tokens}"

    def reverse_kl(self) -> str:
        prompt = types.ModelInput.from_ints(TOKENS[:-1])
        datum = ReverseKLDatum(
            student_input=prompt,
            reference_input=prompt,
            target_tokens=tensor(TOKENS[1:], "int64"),
            weights=tensor([1.0] * 5, "float32"),
        )
        answer = own(
            forward_backward_reverse_kl, self.client, reference_model_path=self.path, data=[datum]
        )
        check(len(answer.outputs) == 1, f"{answer}")
        return f"{answer.metrics}"

    def interpolate(self) -> str:
        self.client.optim_step(types.AdamParams(learning_rate=0.02)).result()
        other = self.client.save_weights_for_sampler("later").result().path
        answer = own(
            interpolate_checkpoints,
            self.service,
            source_paths=[self.path, other],
            coefficients=[0.5, 0.5],
        )
        prompt, params = types.ModelInput.from_ints(TOKENS[:3]), types.SamplingParams(max_tokens=4)
        sampler = self.service.create_sampling_client(model_path=answer.path)
        check(bool(sampler.sample(prompt, 1, params).result().sequences), "no sample")
        return answer.path


if __name__ == "__main__":
    sys.exit(main_of(Mint(), STEPS))

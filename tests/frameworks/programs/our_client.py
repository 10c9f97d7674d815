"""Our client against a server of another hand: what any Tinker server has to answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tinkex
from tinkex import types

sys.path.append(str(Path(__file__).resolve().parents[2] / "peers"))
from steps import check, main_of

TOKENS = [11, 23, 35, 47, 59, 71]
STEPS = (
    *("capabilities", "create", "info", "train", "save_and_load", "sample", "unnamed_sampler"),
    *("refusal", "close"),
)


def loss(output: types.ForwardBackwardOutput) -> float:
    """From the logprobs, since not every server has metrics."""
    return -float(sum(output.loss_fn_outputs[0]["logprobs"].data))


class Client:
    def capabilities(self) -> str:
        self.service = tinkex.ServiceClient(base_url=os.environ["TINKER_BASE_URL"])
        models = self.service.get_server_capabilities().result().supported_models
        self.model = models[0].model_name
        return f"{len(models)} models"

    def create(self) -> str:
        self.client = self.service.create_lora_training_client(
            base_model=self.model, rank=8, seed=5
        ).result()
        return self.client.model_id

    def info(self) -> str:
        return str(self.client.get_info().result().lora_rank)

    def train(self) -> str:
        targets = types.TensorData(data=TOKENS[1:], dtype="int64", shape=[5])
        weights = types.TensorData(data=[1.0] * 5, dtype="float32", shape=[5])
        prompt = types.ModelInput.from_ints(TOKENS[:-1])
        inputs = {"target_tokens": targets, "weights": weights}
        self.data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]
        losses = [self._step() for _ in range(6)]
        check(losses[-1] < losses[0], f"{losses}")
        return f"{losses[0]:.3f} -> {losses[-1]:.3f}"

    def _step(self) -> float:
        passed = self.client.forward_backward(self.data, "cross_entropy")
        stepped = self.client.optim_step(types.AdamParams(learning_rate=0.01))
        stepped.result(timeout=300)
        return loss(passed.result(timeout=300))

    def save_and_load(self) -> str:
        """By the weights alone: this server says that it is of the generation of SDK 0.4.1."""
        path, kept = self.client.save_state("kept").result(timeout=300).path, self._step()
        check(self._step() < kept, "the step after the save changed nothing")
        self.client.load_state(path).result(timeout=300)
        loaded = self._step()
        check(abs(loaded - kept) < 1e-3, f"{kept} when it was saved, {loaded} after the load")
        return path

    def sample(self) -> str:
        path = self.client.save_weights_for_sampler("sampled").result(timeout=300).path
        return self._sampled(self.service.create_sampling_client(path).result())

    def unnamed_sampler(self) -> str:
        return self._sampled(self.client.save_weights_and_get_sampling_client().result())

    def _sampled(self, sampler: tinkex.SamplingClient) -> str:
        prompt = types.ModelInput.from_ints(TOKENS[:3])
        params = types.SamplingParams(max_tokens=4, temperature=0.0, seed=1)
        answer = sampler.sample(prompt, 2, params).result(timeout=300)
        check(len(answer.sequences) == 2, f"{answer}")
        sequence = answer.sequences[0]
        check(len(sequence.tokens) == len(sequence.logprobs) == 4, f"{sequence}")
        return f"{list(sequence.tokens)}"

    def refusal(self) -> str:
        """A checkpoint that nobody has is an error of ours, with the server's words."""
        run = self.client.model_id
        try:
            self.client.load_state(f"tinker://{run}/weights/nobody").result(timeout=300)
        except tinkex.TinkerError as exc:
            return f"{type(exc).__name__}: {exc}"[:200]
        raise AssertionError("a checkpoint that nobody has was loaded")

    def close(self) -> None:
        self.service.close()


if __name__ == "__main__":
    sys.exit(main_of(Client(), STEPS))

"""Thirty steps with the official SDK, in its own venv: argv is URL, model, steps and rate.

Batches that a pool can split, a loss of the user's own, samples of what was saved on the way, a
checkpoint that is loaded again. Any user's script: no retries of its own, no knowledge of the
server. Prints `step N` on stderr, and last one line of JSON with all that it was told.
"""

import json
import os
import sys
import time

import tinker
from tinker import types

NUM_STEPS, LEARNING_RATE = int(sys.argv[3]), float(sys.argv[4])


def datum(step: int, part: int) -> types.Datum:
    length = 5 + (3 * part + step) % 11
    tokens = [(step * 7 + part * 3 + i * (1 + part)) % 97 for i in range(length)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def squares(data, logprobs):
    loss = sum((values**2).sum() for values in logprobs)
    return loss, {"squares": float(loss)}


def sampled(trainer: tinker.TrainingClient, step: int) -> list[list[int]]:
    sampler = trainer.save_weights_and_get_sampling_client(f"step-{step}")
    params = types.SamplingParams(max_tokens=6, seed=step, temperature=1.0)
    prompt = types.ModelInput.from_ints([3, 1, 4, 1, 5])
    answer = sampler.sample(prompt, num_samples=8, sampling_params=params).result()
    return [list(sequence.tokens) for sequence in answer.sequences]


def main() -> None:
    service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-pool")
    trainer = service.create_lora_training_client(sys.argv[2], rank=4, seed=11)
    told = []
    for step in range(NUM_STEPS):
        batches = [[datum(step, part) for part in range(9)], [datum(step, 9), datum(step, 10)]]
        passes = [trainer.forward_backward(batch, "cross_entropy") for batch in batches]
        if step % 10 == 5:
            passes.append(trainer.forward_backward_custom(batches[0], squares))
        done = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        time.sleep(0.1)  # a script has other things to do
        told += [each.result().metrics["loss:sum"] for each in passes[:2]]
        told += [each.result().metrics["squares"] for each in passes[2:]]
        done.result()
        if step % 6 == 3:
            told.append(sampled(trainer, step))
        if step == NUM_STEPS // 2 - 1:
            path = trainer.save_state("half").result().path
            trainer.load_state_with_optimizer(path).result()
        print(f"step {step}", file=sys.stderr, flush=True)
    trainer.save_state("final").result()
    print(json.dumps(told), flush=True)


main()
# The official SDK was once aborted (SIGABRT, without a word), it seems while it ended.
os._exit(0)

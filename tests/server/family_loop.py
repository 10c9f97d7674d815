"""Train, sample, save and resume a model with an SDK: argv is its module, the URL and the models.

Runs with the official SDK in its own venv and with ours; prints one JSON line a model. Everything
it does could be any user's script.
"""

import importlib
import json
import os
import sys

tinker = importlib.import_module(sys.argv[1])
types = tinker.types


def datum(start: int) -> "types.Datum":
    tokens = [(start + i * 5) % 61 for i in range(20)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def steps(client, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        done = client.forward_backward([datum(3), datum(11)], "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=5e-3))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    return losses


def run(service, model: str) -> dict:
    client = service.create_lora_training_client(model, rank=4, seed=11)
    losses = steps(client, 3)
    metrics = client.forward_backward([datum(3)], "cross_entropy").result().metrics
    state = client.save_state("half").result().path
    sampler = service.create_sampling_client(
        model_path=client.save_weights_for_sampler("half").result().path
    )
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=5, stop=[])
    prompt = types.ModelInput.from_ints([(3 + i * 5) % 61 for i in range(20)])
    sampled = sampler.sample(prompt, num_samples=3, sampling_params=params).result()
    resumed = service.create_training_client_from_state(state)
    return {
        "losses": losses,
        "metrics": {name: value for name, value in metrics.items() if name.startswith("e_")},
        "samples": [len(sequence.tokens) for sequence in sampled.sequences],
        "resumed": steps(resumed, 2),
    }


def main() -> None:
    service = tinker.ServiceClient(base_url=sys.argv[2], api_key="tml-families")
    for model in sys.argv[3:]:
        print(json.dumps(run(service, model)), flush=True)


main()
if sys.argv[1] == "tinker":
    # The official SDK was once aborted (SIGABRT, without a word), it seems while it ended.
    os._exit(0)

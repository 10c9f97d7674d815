"""One program, two SDKs: `python same_scenario.py MODULE BASE_URL` prints all its numbers as JSON.

Says nothing about whether the numbers are right, only what they are; the test compares them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

tinker = importlib.import_module(sys.argv[1])
types = importlib.import_module(sys.argv[1] + ".types")

PROMPT = [11, 23, 35, 47, 59]
SEQUENCES = [[11, 23, 35, 47, 59, 71], [12, 24, 36, 48], [13, 25, 37, 49, 61]]


def datum(tokens, **extra):
    targets = tokens[1:]
    inputs = {"target_tokens": targets, **(extra or {"weights": [1.0] * len(targets)})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def outputs(result):
    return [[float(x) for x in out["logprobs"].data] for out in result.loss_fn_outputs]


def train(client, numbers):
    data = [datum(tokens) for tokens in SEQUENCES]
    for _ in range(5):
        loss = client.forward_backward(data, "cross_entropy")
        step = client.optim_step(types.AdamParams(learning_rate=0.02, weight_decay=0.01))
        numbers["losses"].append([loss.result().metrics, outputs(loss.result())])
        numbers["steps"].append(step.result().metrics)
    rl = [
        datum(t, logprobs=[-1.0] * (len(t) - 1), advantages=[0.5] * (len(t) - 1)) for t in SEQUENCES
    ]
    for name, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
    ):
        result = client.forward(rl, name, config).result()
        numbers["rl"][name] = [result.metrics, outputs(result)]
    many = client.forward_backward(data * 700, "cross_entropy").result()
    numbers["chunked"] = [many.metrics["loss:sum"], len(many.loss_fn_outputs)]
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()


def sample(sampler, numbers):
    params = types.SamplingParams(max_tokens=8, seed=3, temperature=0.7)
    answer = sampler.sample(
        types.ModelInput.from_ints(PROMPT),
        3,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    numbers["samples"].append(
        {
            "tokens": [list(map(int, s.tokens)) for s in answer.sequences],
            "logprobs": [list(map(float, s.logprobs)) for s in answer.sequences],
            "stops": [str(s.stop_reason) for s in answer.sequences],
            "prompt": answer.prompt_logprobs,
            "topk": answer.topk_prompt_logprobs,
        }
    )
    numbers["scores"].append(sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result())


def main():
    numbers = {"losses": [], "steps": [], "rl": {}, "samples": [], "scores": []}
    service = tinker.ServiceClient(
        base_url=sys.argv[2], api_key="tml-same", user_metadata={"a": "b"}
    )
    model = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_lora_training_client(model, rank=8, seed=7)
    train(client, numbers)
    saved = client.save_state("state", ttl_seconds=7200).result()
    named = client.save_weights_for_sampler("named").result()
    sample(client.create_sampling_client(named.path), numbers)
    sample(client.save_weights_and_get_sampling_client(), numbers)
    sample(service.create_sampling_client(base_model=model), numbers)
    again = service.create_training_client_from_state_with_optimizer(saved.path)
    numbers["resumed"] = again.forward([datum(SEQUENCES[0])], "cross_entropy").result().metrics
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    numbers["checkpoints"] = sorted(
        [c.checkpoint_id, c.checkpoint_type, c.public, c.expires_at is None] for c in listed
    )
    info = rest.get_weights_info_by_tinker_path(saved.path).result()
    numbers["info"] = [info.base_model, info.is_lora, info.lora_rank]
    run = rest.get_training_run(client.model_id).result()
    numbers["run"] = [run.base_model, run.is_lora, run.lora_rank]
    print(json.dumps(numbers, sort_keys=True), flush=True)


main()
if sys.argv[1] == "tinker":
    # The official SDK was once aborted (SIGABRT, without a word), it seems while it ended.
    os._exit(0)

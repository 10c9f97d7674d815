"""A recorded conversation goes on from its own tokens and comes back ready to train on."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest


def turn(api, model: str, trajectory: str, messages: list[dict[str, Any]], **fields: Any):
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 6,
        "trajectory": trajectory,
        "return_token_ids": True,
        **fields,
    }
    answer = api.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def trajectory() -> str:
    return f"game-{secrets.token_hex(4)}"


def test_a_later_turn_begins_with_the_recorded_tokens(world, api, trajectory: str):
    """Also where the text would be tokenised otherwise: here the first answer was cut in half."""
    messages = [{"role": "user", "content": "abc"}]
    first = turn(api, world.path, trajectory, messages, seed=3)
    said = first["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "go on"}]
    second = turn(api, world.path, trajectory, messages, seed=4)
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_it_comes_back_as_sequences_with_masks_and_logprobs(world, api, trajectory: str):
    messages = [{"role": "user", "content": "abc"}]
    first = turn(api, world.path, trajectory, messages, n=2, seed=5)
    branches = [choice["message"] for choice in first["choices"]]
    more = [*messages, branches[0], {"role": "user", "content": "more"}]
    second = turn(api, world.path, trajectory, more, seed=6)
    found = world.service.trajectories(trajectory).result()
    assert len(found.sequences) == 2  # one branch went on, the other ended
    longest = max(found.sequences, key=lambda sequence: len(sequence.tokens))
    assert list(longest.tokens) == second["prompt_token_ids"] + second["choices"][0]["token_ids"]
    num_sampled = len(first["choices"][0]["token_ids"]) + len(second["choices"][0]["token_ids"])
    assert sum(longest.mask) == num_sampled
    assert longest.snapshots


def test_an_answer_follows_the_one_its_prompt_was_built_on(world, api, trajectory: str):
    """Two answers may read the same and differ in their tokens; the later is gone on from."""
    messages = [{"role": "user", "content": "abc"}]
    said = [turn(api, world.model, trajectory, messages, temperature=0) for _ in range(2)]
    message = said[0]["choices"][0]["message"]
    assert message == said[1]["choices"][0]["message"]
    more = [*messages, message, {"role": "user", "content": "more"}]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(turn, api, world.model, trajectory, more, seed=n) for n in range(4)]
        answers = [one.result() for one in asked]
    found = world.service.trajectories(trajectory).result()
    known = {tuple(sequence.tokens) for sequence in found.sequences}
    for answer in answers:
        tokens = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        assert tuple(tokens) in known


def test_every_dialect_records(world, api, trajectory: str):
    headers = {"x-tinkex-trajectory": trajectory, "anthropic-version": "2023-06-01"}
    body = {"model": world.model, "input": "abc", "max_output_tokens": 4}
    assert api.post("/v1/responses", json=body, headers=headers).status_code == 200
    body = {"model": world.model, "max_tokens": 4}
    messages = {"messages": [{"role": "user", "content": "abc"}]}
    assert api.post("/v1/messages", json=body | messages, headers=headers).status_code == 200
    assert len(world.service.trajectories(trajectory).result().answers) == 2
    refused = api.post("/v1/completions", json=body | {"prompt": "abc"}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "trajectory"


def test_its_datums_are_on_policy(world, api, trajectory: str):
    """Trained by importance sampling on the weights that made it, every ratio is one."""
    messages = [{"role": "user", "content": "abc"}]
    turn(api, world.model, trajectory, messages, seed=8)
    datums = world.service.trajectories(trajectory).result().to_datums(reward=1.0)
    training = world.service.create_lora_training_client(base_model=world.model, rank=4)
    result = training.forward_backward(datums, "importance_sampling").result()
    sampled = [
        (new, old)
        for datum, output in zip(datums, result.loss_fn_outputs, strict=True)
        for new, old, advantage in zip(
            output["logprobs"].tolist(),
            datum.loss_fn_inputs["logprobs"].tolist(),
            datum.loss_fn_inputs["advantages"].tolist(),
            strict=True,
        )
        if advantage
    ]
    assert len(sampled) == 6
    assert all(abs(new - old) < 1e-5 for new, old in sampled)


def test_a_trajectory_is_its_owners(world, api, trajectory: str):
    turn(api, world.model, trajectory, [{"role": "user", "content": "abc"}])
    path = f"/api/v1/trajectories/{trajectory}"
    assert api.get(path, headers={"X-API-Key": "tml-two"}).status_code == 404
    assert api.get(path, headers={"X-API-Key": "tml-one"}).status_code == 200
    assert api.delete(path, headers={"X-API-Key": "tml-one"}).json()["num_answers"] == 1
    assert api.get(path, headers={"X-API-Key": "tml-one"}).status_code == 404

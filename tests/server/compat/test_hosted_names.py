"""Names and paths of the hosted service: context suffixes, `BASE;CHECKPOINT`, `/anthropic/api`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import tinkex
from tinkex import Datum, ModelInput, SamplingParams

KEY, OTHER_KEY = "tml-one", "tml-two"
VERSION = {"anthropic-version": "2023-06-01"}
CONTEXT = 1024
"""Of the tiny model."""


def complete(api: httpx.Client, model: str, prompt: Any = "abc", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return api.post("/v1/completions", json={**body, "return_token_ids": True})


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_a_name_with_a_length_of_context_means_its_base_model(world, api):
    said = tokens(complete(api, world.model))
    assert tokens(complete(api, f"{world.model}:peft:256")) == said
    assert tokens(complete(api, f"{world.model}:peft:{CONTEXT}")) == said


def test_the_length_that_was_asked_for_is_the_limit(world, api):
    long = [1] * 300
    assert complete(api, world.model, long).status_code == 200
    refused = complete(api, f"{world.model}:peft:256", long)
    assert (refused.status_code, "256" in refused.text) == (400, True), refused.text
    chat = {"model": f"{world.model}:peft:256", "max_tokens": 4}
    chat["messages"] = [{"role": "user", "content": "a" * 300}]
    refused = api.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, "256" in refused.text) == (400, True), refused.text


@pytest.mark.parametrize("length", [CONTEXT + 1, 262_144, 0, 10**11])
def test_more_context_than_the_model_has_is_refused_with_the_number(world, api, length: int):
    refused = complete(api, f"{world.model}:peft:{length}")
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert f"a context of {length} tokens" in message
    assert f"one of {CONTEXT} tokens" in message


@pytest.mark.parametrize("suffix", [":peft:", ":peft:x", ":peft:-1", ":peft:12:", ":lora:12"])
def test_another_suffix_is_no_model(world, api, suffix: str):
    assert complete(api, f"{world.model}{suffix}").status_code == 404


def test_a_run_with_a_length_of_context_trains_and_refuses_longer_data(world):
    service = world.service
    training = service.create_lora_training_client(f"{world.model}:peft:64", rank=4).result()

    def datum(size: int) -> Datum:
        inputs = {"target_tokens": [1] * size, "weights": [1.0] * size}
        return Datum(model_input=ModelInput.from_ints([1] * size), loss_fn_inputs=inputs)

    assert training.forward_backward([datum(64)], "cross_entropy").result().metrics
    with pytest.raises(tinkex.TinkerError, match="64"):
        training.forward_backward([datum(65)], "cross_entropy").result()
    assert training.forward_backward([datum(3)], "cross_entropy").result().metrics
    with pytest.raises(tinkex.TinkerError, match=f"one of {CONTEXT} tokens"):
        service.create_lora_training_client(f"{world.model}:peft:262144", rank=4).result()


def test_a_checkpoint_is_sampled_with_the_context_of_the_base_that_stands_before_it(world, api):
    said = tokens(complete(api, world.path))
    name = f"{world.model}:peft:256;{world.path}"
    assert tokens(complete(api, name)) == said
    assert tokens(complete(api, f"{world.model};{world.path}")) == said
    long = [1] * 300
    assert complete(api, world.path, long).status_code == 200
    assert complete(api, name, long).status_code == 400
    assert complete(api, f"{world.model}:peft:99999;{world.path}").status_code == 400
    sampler = world.service.create_sampling_client(world.path, f"{world.model}:peft:256").result()
    with pytest.raises(tinkex.TinkerError, match="256"):
        sampler.sample(ModelInput.from_ints(long), 1, SamplingParams(max_tokens=4)).result()


def test_a_base_that_is_not_the_checkpoints_own_is_refused(world, api):
    wrong = complete(api, f"nobody;{world.path}")
    assert (wrong.status_code, "nobody" in wrong.text) == (404, True)
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    with httpx.Client(base_url=world.base_url, headers=headers) as other:
        assert complete(other, f"{world.model};{world.path}").status_code == 404


def test_the_hosted_path_of_anthropics_api_answers_like_its_own(world, api):
    body = {"model": world.path, "max_tokens": 8, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "abc"}]
    hosted = api.post("/anthropic/api/v1/messages", json=body, headers=VERSION)
    own = api.post("/v1/messages", json=body, headers=VERSION)
    assert hosted.status_code == 200, hosted.text
    assert hosted.json()["content"] == own.json()["content"]
    counted = {name: body[name] for name in ("model", "messages")}
    url = "/anthropic/api/v1/messages/count_tokens"
    assert api.post(url, json=counted, headers=VERSION).json()["input_tokens"] > 0


def test_the_hosted_path_of_anthropics_api_lists_models_in_its_form(world, api):
    listed = api.get("/anthropic/api/v1/models", headers=VERSION).json()
    assert listed == api.get("/v1/models", headers=VERSION).json()
    assert world.model in [model["id"] for model in listed["data"]]


def test_the_hosted_path_refuses_in_anthropics_words_and_before_the_body(world, api):
    body = {"model": "nobody", "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
    url = "/anthropic/api/v1/messages"
    absent = api.post(url, json=body, headers=VERSION)
    assert absent.status_code == 404
    assert absent.json()["error"]["type"] == "not_found_error"
    with httpx.Client(base_url=world.base_url) as stranger:
        refused = stranger.post(url, json=body, headers=VERSION)
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    unknown = api.post("/anthropic/api/v1/nothing", json={}, headers=VERSION)
    assert (unknown.status_code, unknown.json()["type"]) == (404, "error")


def test_own_checkpoints_are_listed_as_fine_tunes_of_their_base(world: SimpleNamespace, api):
    rest = world.service.create_rest_client()
    rest.name_checkpoint(world.path, "tuned").result()
    listed = {model["id"]: model for model in api.get("/v1/models").json()["data"]}
    assert (listed[world.model]["root"], listed[world.model]["parent"]) == (world.model, None)
    for name in ("tuned", world.path):
        assert listed[name]["parent"] == world.model
        assert listed[name]["root"] == world.path
        assert listed[name]["created"] > 0
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    with httpx.Client(base_url=world.base_url, headers=headers) as other:
        assert [model["id"] for model in other.get("/v1/models").json()["data"]] == [world.model]


def test_a_name_of_anothers_checkpoint_is_listed_while_it_is_shared(world: SimpleNamespace, api):
    rest = world.service.create_rest_client()
    with tinkex.ServiceClient(base_url=world.base_url, api_key=OTHER_KEY) as service:
        headers = {"Authorization": f"Bearer {OTHER_KEY}"}
        with httpx.Client(base_url=world.base_url, headers=headers) as other:

            def names() -> list[str]:
                return [model["id"] for model in other.get("/v1/models").json()["data"]]

            rest.publish_checkpoint_from_tinker_path(world.path).result()
            try:
                service.create_rest_client().name_checkpoint(world.path, "theirs").result()
                assert "theirs" in names()
            finally:
                rest.unpublish_checkpoint_from_tinker_path(world.path).result()
            assert "theirs" not in names(), "nobody is told what is no longer shared with them"
            assert other.get("/v1/models/theirs").status_code == 404
    rest.remove_checkpoint_name("tuned").result()

"""OpenAI's endpoints say what `sample` says, token for token, of the adapter that was named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tinkex import ModelInput, SamplingParams

KEY, OTHER_KEY = "tml-one", "tml-two"
ASK = [{"role": "user", "content": "abc"}]


def chat(api: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": ASK, "max_tokens": 12, "seed": 7, **fields}
    return api.post("/v1/chat/completions", json=body)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("named", ["base", "adapter"])
def test_three_ways_to_ask_give_the_same_tokens_and_logprobs(world, api, named: str):
    """`/chat/completions`, `/completions` and `sample` are one sampler: equal to the bit."""
    model = world.model if named == "base" else world.path
    said = chat(api, model, logprobs=True, return_token_ids=True).json()
    prompt, choice = said["prompt_token_ids"], said["choices"][0]
    scores = [one["logprob"] for one in choice["logprobs"]["content"]]
    fields = {"max_tokens": 12, "seed": 7, "logprobs": 0, "return_token_ids": True}
    written = api.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})
    other = written.json()["choices"][0]
    assert other["token_ids"] == choice["token_ids"]
    assert other["logprobs"]["token_logprobs"] == scores
    where = {"model_path": model} if named == "adapter" else {"base_model": model}
    sampler = world.service.create_sampling_client(**where)
    params = SamplingParams(max_tokens=12, seed=7)
    sampled = sampler.sample(ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    assert sampled.tokens == choice["token_ids"]
    assert sampled.logprobs == scores


def test_a_cached_prompt_changes_no_bit(world, api):
    messages = [{"role": "user", "content": "a prompt that fills more than one block of the cache"}]
    fields = {"messages": messages, "logprobs": True, "return_token_ids": True}
    first, again = (chat(api, world.path, **fields).json() for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"] == first["choices"]


def test_the_adapter_named_is_the_adapter_served(world, api):
    """Its logprobs of a text are those of `compute_logprobs` on it, and not the base model's."""
    text = list(b"abcdefgh")
    ask = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
    scores = {}
    for model in (world.model, world.path):
        answer = api.post("/v1/completions", json={"model": model, **ask}).json()
        scores[model] = answer["choices"][0]["logprobs"]["token_logprobs"]
    sampler = world.service.create_sampling_client(model_path=world.path)
    expected = sampler.compute_logprobs(ModelInput.from_ints(text)).result()
    assert scores[world.path][1:] == expected[1:]
    assert sum(scores[world.path][1:]) > sum(scores[world.model][1:]) + 5


def test_a_short_name_means_its_checkpoint(world, api):
    headers = {"X-API-Key": KEY}
    named = {"name": "letters", "path": world.path}
    assert api.post("/api/v1/checkpoint_names", json=named, headers=headers).status_code == 200
    by_name, by_path = chat(api, "letters").json(), chat(api, world.path).json()
    assert by_name["choices"] == by_path["choices"]
    assert "letters" in [model["id"] for model in api.get("/v1/models").json()["data"]]
    assert api.delete("/api/v1/checkpoint_names/letters", headers=headers).status_code == 200
    assert chat(api, "letters").status_code == 404


def test_another_users_checkpoint_does_not_exist(world, api):
    api.headers["Authorization"] = f"Bearer {OTHER_KEY}"
    assert chat(api, world.path).status_code == 404
    assert world.path not in [model["id"] for model in api.get("/v1/models").json()["data"]]
    assert chat(api, world.model).status_code == 200


def test_a_stream_says_what_the_whole_says(world, api):
    fields = {"logprobs": True, "return_token_ids": True, "n": 2}
    whole = chat(api, world.path, **fields).json()
    usage = {"stream_options": {"include_usage": True}}
    chunks = events(chat(api, world.path, stream=True, **fields, **usage).text)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for index in range(2):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content") or "" for choice in mine)
        tokens = [token for choice in mine for token in choice.get("token_ids", [])]
        scores = [
            one["logprob"]
            for choice in mine
            for one in (choice["logprobs"] or {"content": []})["content"]
        ]
        expected = whole["choices"][index]
        assert text == expected["message"]["content"]
        assert tokens == expected["token_ids"]
        assert scores == [one["logprob"] for one in expected["logprobs"]["content"]]
        assert mine[-1]["finish_reason"] == expected["finish_reason"]


def test_a_stop_string_ends_the_text_and_is_not_in_it(world, api):
    whole = chat(api, world.model, max_tokens=64).json()
    text = whole["choices"][0]["message"]["content"]
    stop = next(c for c in text[2:] if c.isprintable() and c != "\ufffd")
    answer = chat(api, world.model, max_tokens=64, stop=stop)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_the_likeliest_tokens_contain_the_greedy_one(world, api):
    said = chat(api, world.model, temperature=0, logprobs=True, top_logprobs=3).json()
    for one in said["choices"][0]["logprobs"]["content"]:
        assert one["top_logprobs"][0]["token_id"] == one["token_id"]
        assert len(one["top_logprobs"]) == 3


GREEDY = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0}]


@pytest.mark.parametrize("fields", GREEDY, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_setting_of_a_draw_is_honoured(world, api, path: str, fields: dict[str, Any]):
    """Each leaves only the likeliest token, so a seed no longer matters."""
    asked = {"messages": ASK} if "chat" in path else {"prompt": "abc"}
    body = {"model": world.model, "max_tokens": 12, "return_token_ids": True, **asked}

    def tokens(**more: Any) -> list[int]:
        answer = api.post(path, json={**body, **more})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    greedy = tokens(temperature=0)
    assert [tokens(seed=seed, **fields) for seed in (1, 2)] == [greedy, greedy]
    assert tokens(seed=1) != tokens(seed=2), "without it the seed decides"


def test_a_bias_decides_and_lengths_have_two_names(world, api):
    letter = ord("q")
    fields = {"logit_bias": {str(letter): 100}, "return_token_ids": True}
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"model": world.model, "messages": ASK, name: 5, **fields}
        said = api.post("/v1/chat/completions", json=body).json()
        assert said["choices"][0]["token_ids"] == [letter] * 5
        assert said["choices"][0]["finish_reason"] == "length"


def test_many_prompts_in_one_request_are_answered_in_order(world, api):
    body = {
        "model": world.model,
        "prompt": ["abc", "xyz"],
        "max_tokens": 4,
        "seed": 1,
        "echo": True,
    }
    choices = api.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"][:3] for choice in choices] == ["abc", "xyz"]
    assert [choice["index"] for choice in choices] == [0, 1]


REFUSED = [
    ({"model": "nobody/nothing"}, 404, "model"),
    ({"max_tokens": 100_000}, 400, "max_tokens"),
    ({"wings": 2}, 400, "wings"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
    ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"n": 100_000}, 400, "n"),
    ({"stop": [""]}, 400, "stop"),
    ({"chat_template_kwargs": {"evil": 1}}, 400, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "status", "word"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_in_openais_shape(
    world, api, fields: dict[str, Any], status: int, word: str, stream: bool
):
    answer = chat(api, **{"model": world.model, **fields, "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert word in f"{error['param']} {error['message']}"


def test_a_wrong_key_is_refused_in_openais_shape(world, api):
    api.headers["Authorization"] = "Bearer tml-wrong"
    answer = chat(api, world.model)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_what_does_nothing_is_named_in_a_header(world, api):
    answer = chat(api, world.model, user="ann", metadata={"a": "b"})
    assert answer.headers["x-tinkex-ignored"] == "metadata, user"
    function = {"name": "f", "strict": True}
    message = {**ASK[0], "wings": 2, "\u00e9": 1, "annotations": None}
    tools = [{"type": "function", "function": function}]
    answer = chat(api, world.model, messages=[message], tools=tools)
    assert answer.headers["x-tinkex-ignored"] == "messages.wings, tools.strict"


def test_what_stands_inside_a_field_and_does_nothing_is_named_too(world, api):
    part = {"type": "text", "text": "abc", "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "arguments": "{}", "mood": 1}
    call = {"id": "c", "type": "function", "function": function, "index": 0}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    tool = {"type": "function", "function": {"name": "f", "returns": 1}, "mood": 1}
    answer = chat(
        api,
        world.model,
        messages=messages,
        tools=[tool],
        stream_options={"include_usage": True, "include_obfuscation": False},
        reasoning_effort="low",  # the template of these tests knows neither
        chat_template_kwargs={"enable_thinking": False},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tinkex-ignored"].split(", ") == [
        "chat_template_kwargs.enable_thinking",
        "messages.content.cache_control",
        "messages.tool_calls.function.mood",
        "messages.tool_calls.index",
        "reasoning_effort",
        "stream_options.include_obfuscation",
        "tools.function.returns",
        "tools.mood",
    ]


def test_the_second_chat_api_names_what_it_leaves_out(world, api):
    item = {"role": "user", "content": [{"type": "input_text", "text": "abc", "mood": 1}], "as": 1}
    body = {
        "model": world.model,
        "input": [item],
        "max_output_tokens": 4,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": [{"type": "function", "name": "f", "strict": True, "mood": 1}],
        "include": ["message.output_text.logprobs"],
    }
    answer = api.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tinkex-ignored"].split(", ") == [
        "include",
        "input.as",
        "input.content.mood",
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        "tools.mood",
        "tools.strict",
    ]


def test_thoughts_sent_back_are_read(world, api):
    """The prompt is as long as that of the same conversation in the first chat API."""
    thought = "I think so."
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": thought,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    items = [
        *ASK,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    one = chat(api, world.model, messages=messages, max_tokens=1)
    body = {"model": world.model, "input": items, "max_output_tokens": 1}
    other = api.post("/v1/responses", json=body)
    del items[1]
    without = api.post("/v1/responses", json=body)
    assert other.json()["usage"]["input_tokens"] == one.json()["usage"]["prompt_tokens"]
    assert other.json()["usage"]["input_tokens"] > without.json()["usage"]["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_tells_the_prompts_tokens_once(world, api, path: str):
    asked = {"messages": ASK} if "chat" in path else {"prompt": "abc"}
    body = {"model": world.model, "max_tokens": 4, "return_token_ids": True, **asked}
    whole = api.post(path, json=body).json()
    chunks = events(api.post(path, json={**body, "stream": True}).text)
    found = [
        ids
        for chunk in chunks
        for ids in (chunk.get("prompt_token_ids"), chunk["choices"][0].get("prompt_token_ids"))
        if ids
    ]
    choice = whole["choices"][0]
    assert found == [whole.get("prompt_token_ids") or choice["prompt_token_ids"]]


def test_embeddings_are_refused_in_words(world, api):
    answer = api.post("/v1/embeddings", json={"model": world.model, "input": "x"})
    assert answer.status_code == 400
    assert "embeddings" in answer.json()["error"]["message"]


def test_the_hosted_path_is_the_same(world, api):
    body = {"model": world.model, "messages": ASK, "max_tokens": 4, "seed": 1}
    one = api.post("/v1/chat/completions", json=body).json()
    other = api.post("/oai/api/v1/chat/completions", json=body).json()
    assert one["choices"] == other["choices"]


def test_the_second_chat_api_gives_the_same_text(world, api):
    fields = {"model": world.model, "temperature": 0, "max_output_tokens": 8}
    said = api.post("/v1/responses", json={**fields, "input": "abc"}).json()
    same = chat(api, world.model, temperature=0, max_tokens=8).json()
    assert said["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]
    kept = api.post("/v1/responses", json={**fields, "input": "a", "previous_response_id": "r"})
    assert kept.status_code == 400


def test_a_service_client_says_where_openai_clients_go(world):
    options = world.service.openai_options()
    assert options == {"base_url": f"{world.base_url}/v1", "api_key": KEY}


def test_usage_counts_for_the_caller(world: SimpleNamespace, api):
    counted = chat(api, world.model).json()["usage"]
    assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]

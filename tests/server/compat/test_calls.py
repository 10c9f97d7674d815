"""One call of a tool at most, where that was asked for; and how many tokens were thoughts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import tinkex

ASK = [{"role": "user", "content": "?"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
THOUGHT = "<think>\nhm\n</think>"
ONE = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
TWO = ONE.replace("1", "2")
SAID = f"{THOUGHT}{ONE}{TWO}<|im_end|>"


@pytest.fixture(scope="module")
def caller(world: SimpleNamespace, api_of_module: httpx.Client) -> str:
    """A checkpoint that thinks, then makes two calls."""
    body = {"model": world.model, "messages": ASK, "tools": TOOLS, "max_tokens": 1}
    body["return_token_ids"] = True
    asked = api_of_module.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
    training = world.service.create_lora_training_client(base_model=world.model, rank=16, seed=0)
    said = training.get_tokenizer().encode(SAID)
    tokens = [*asked, *said]
    weights = [0.0] * (len(asked) - 1) + [1.0] * len(said)
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )
    for _ in range(400):
        result = training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=5e-3))
        if min(result.result().loss_fn_outputs[0]["logprobs"].tolist()[-len(said) :]) > -0.3:
            break
    return str(training.save_weights_for_sampler("caller").result().path)


@pytest.fixture(scope="module")
def api_of_module(world: SimpleNamespace):
    headers = {"Authorization": "Bearer tml-one", "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=world.base_url, headers=headers, timeout=60) as client:
        yield client


def ask(api: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = api.post(path, json={"temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    assert "x-tinkex-ignored" not in answer.headers
    return answer.json()


def chat(api: httpx.Client, caller: str, **fields: Any) -> dict[str, Any]:
    fields = {"messages": ASK, "tools": TOOLS, "max_tokens": 200, **fields}
    return ask(api, "/v1/chat/completions", model=caller, **fields)


def events_of(api: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = api.post(path, json={"temperature": 0, "stream": True, **fields})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_without_the_wish_both_calls_are_told(caller, api_of_module):
    (choice,) = chat(api_of_module, caller)["choices"]
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["message"]["reasoning_content"] == "hm"


def test_one_call_ends_the_answer_and_its_tokens(caller, api_of_module):
    wishes = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    both = chat(api_of_module, caller, **wishes)
    one = chat(api_of_module, caller, **wishes, parallel_tool_calls=False)
    choice = one["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"n": 1}
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    assert "".join(t["token"] for t in choice["logprobs"]["content"]) == THOUGHT + ONE
    for usage in (one["usage"], both["usage"]):
        del usage["prompt_tokens_details"]  # how much of it was cached, by whoever asked before
    assert one["usage"] == both["usage"]  # what was cut off was made all the same


def test_a_stream_ends_with_the_first_call_too(caller, api_of_module):
    fields = {"messages": ASK, "tools": TOOLS, "max_tokens": 200, "logprobs": True}
    fields |= {"stream_options": {"include_usage": True}, "parallel_tool_calls": False}
    chunks = events_of(api_of_module, "/v1/chat/completions", model=caller, **fields)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert len([c for x in choices for c in x["delta"].get("tool_calls", ())]) == 1
    told = [t["token"] for x in choices if x["logprobs"] for t in x["logprobs"]["content"]]
    assert "".join(told) == THOUGHT + ONE
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_conversation_goes_on_from_its_first_call(caller, world, api_of_module):
    """What was cut off is not in the tokens that a trajectory goes on from."""
    wishes = {"trajectory": "one-call", "parallel_tool_calls": False, "return_token_ids": True}
    said = chat(api_of_module, caller, **wishes)
    message, tokens = said["choices"][0]["message"], said["choices"][0]["token_ids"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    del message["refusal"]
    more = chat(api_of_module, caller, **wishes, messages=[*ASK, message, result])
    before = [*said["prompt_token_ids"], *tokens]
    assert more["prompt_token_ids"][: len(before)] == before
    decode = world.service.create_sampling_client(model_path=caller).get_tokenizer().decode
    assert TWO not in decode(more["prompt_token_ids"])


def test_the_second_chat_api_counts_thoughts_and_ends_with_one_call(caller, api_of_module):
    fields = {"input": "?", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200}
    made = ask(api_of_module, "/v1/responses", model=caller, **fields, parallel_tool_calls=False)
    kinds = [item["type"] for item in made["output"]]
    assert kinds == ["reasoning", "function_call"]
    assert made["parallel_tool_calls"] is False
    # A byte is a token here, and the last of an opening tag is the first that is surely one.
    num_thoughts = len(">\nhm\n</think>")
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thoughts}
    events = events_of(api_of_module, "/v1/responses", model=caller, **fields)
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]].count("function_call") == 2
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thoughts}


def test_thoughts_left_in_the_content_are_content(caller, api_of_module):
    made = chat(api_of_module, caller, separate_reasoning=False)
    assert made["choices"][0]["message"]["content"].startswith("<think>")
    assert made["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_anthropics_way_to_say_it(caller, api_of_module):
    tool = {"name": "f", "input_schema": FUNCTION["parameters"]}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    fields = {"model": caller, "messages": ASK, "tools": [tool], "max_tokens": 200}
    made = ask(api_of_module, "/v1/messages", **fields, tool_choice=choice)
    assert [block["type"] for block in made["content"]] == ["thinking", "tool_use"]
    assert made["stop_reason"] == "tool_use"
    wrong = {"type": "auto", "disable_parallel_tool_use": "yes"}
    refused = api_of_module.post("/v1/messages", json={**fields, "tool_choice": wrong})
    assert refused.status_code == 400
    assert "disable_parallel_tool_use" in refused.text

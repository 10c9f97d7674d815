"""What each foreign client does against a server; runs inside the client's own environment.

`python scenarios.py CLIENT BASE_URL MODEL CALLER` prints one JSON object of facts; a failed check
is an AssertionError and a non-zero exit. CALLER is a checkpoint that learned one tool call.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEATHER_ASK = [{"role": "user", "content": "How is the weather in Paris?"}]
CITY = {"city": "Paris"}
KEY = "tml-client"


def openai(base_url: str, model: str, caller: str) -> dict[str, Any]:
    import openai as library

    client = library.OpenAI(base_url=f"{base_url}/v1", api_key=KEY)
    assert model in [one.id for one in client.models.list()]
    fields: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    said = whole.choices[0]
    assert len(said.logprobs.content) == whole.usage.completion_tokens
    assert math.isfinite(said.logprobs.content[0].logprob)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == said.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    _openai_tools(client, caller)
    _openai_responses(client, model, caller)

    async def ask() -> str:
        async with library.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=KEY) as other:
            answer = await other.chat.completions.create(**fields)
            return answer.choices[0].message.content or ""

    assert asyncio.run(ask()) == text
    try:
        client.chat.completions.create(**{**fields, "model": "nobody"})
    except library.NotFoundError as exc:
        refused = exc.body["code"]
    assert refused == "model_not_found"
    tried = "sync, async, streams, logprobs, tools both ways, responses, refusals"
    return {"version": library.__version__, "tried": tried}


def _openai_tools(client: Any, caller: str) -> None:
    """A call is made, answered, and the conversation goes on."""
    tools = [{"type": "function", "function": TOOL}]
    asked: dict[str, Any] = {"model": caller, "tools": tools, "max_tokens": 64, "temperature": 0}
    said = client.chat.completions.create(**asked, messages=WEATHER_ASK).choices[0]
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CITY)
    alone = client.chat.completions.with_raw_response.create(
        **asked, messages=WEATHER_ASK, parallel_tool_calls=False
    )
    assert "x-tinkex-ignored" not in alone.headers
    assert len(alone.parse().choices[0].message.tool_calls) == 1
    with client.chat.completions.stream(**asked, messages=WEATHER_ASK) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == CITY
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    more = client.chat.completions.create(**asked, messages=[*WEATHER_ASK, said.message, result])
    assert more.usage.prompt_tokens > 0


def _openai_responses(client: Any, model: str, caller: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Say hi", "max_output_tokens": 8}
    assert client.responses.create(**asked).output_text
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text
    asked = {"model": caller, "tools": [{"type": "function", **TOOL}]}
    asked |= {"max_output_tokens": 64, "temperature": 0}
    first = client.responses.create(**asked, input=WEATHER_ASK)
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("weather", CITY)
    assert first.usage.output_tokens_details.reasoning_tokens == 0  # this model does not think
    alone = client.responses.create(**asked, input=WEATHER_ASK, parallel_tool_calls=False)
    assert alone.parallel_tool_calls is False
    with client.responses.stream(**asked, input=WEATHER_ASK) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response().output[-1]
    assert "response.function_call_arguments.done" in kinds
    assert json.loads(last.arguments) == CITY
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = client.responses.create(**asked, input=[*WEATHER_ASK, *first.output, result])
    assert more.status in ("completed", "incomplete")


def anthropic(base_url: str, model: str, caller: str) -> dict[str, Any]:
    import anthropic as library

    client = library.Anthropic(base_url=base_url, api_key=KEY)
    fields: dict[str, Any] = {"model": model, "max_tokens": 12, "messages": ASK}
    greedy = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields, **greedy)
    with client.messages.stream(**fields, **greedy) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    client.messages.create(**fields, system="Be brief.")
    _anthropic_tools(client, caller)
    counted = client.messages.count_tokens(model=model, messages=ASK).input_tokens
    usage = whole.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    async def ask() -> str:
        async with library.AsyncAnthropic(base_url=base_url, api_key=KEY) as other:
            answer = await other.messages.create(**fields, **greedy)
            return str(answer.content[0].text)

    assert asyncio.run(ask()) == text
    try:
        client.messages.create(**{**fields, "model": "nobody"})
    except library.NotFoundError as exc:
        refused = exc.body["error"]["type"]
    assert refused == "not_found_error"
    tried = "sync, async, streams, system prompts, tools both ways, counting, refusals"
    return {"version": library.__version__, "tried": tried}


def _anthropic_tools(client: Any, caller: str) -> None:
    tool = {k: TOOL[k] for k in ("name", "description")} | {"input_schema": TOOL["parameters"]}
    asked: dict[str, Any] = {"model": caller, "tools": [tool], "max_tokens": 64}
    asked["extra_body"] = {"temperature": 0}
    said = client.messages.create(**asked, messages=WEATHER_ASK)
    use = said.content[-1]
    assert (said.stop_reason, use.type, use.name, use.input) == (
        "tool_use",
        "tool_use",
        "weather",
        CITY,
    )
    with client.messages.stream(**asked, messages=WEATHER_ASK) as stream:
        assert stream.get_final_message().content[-1].input == CITY
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [
        *WEATHER_ASK,
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**asked, messages=turns).usage.output_tokens


def litellm(base_url: str, model: str, caller: str) -> dict[str, Any]:
    from importlib.metadata import version

    import litellm as library

    fields: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": f"{base_url}/v1",
        "api_key": KEY,
        "messages": ASK,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = library.completion(**fields)
    chunks = library.completion(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    tools = [{"type": "function", "function": TOOL}]
    fields |= {"model": f"openai/{caller}", "messages": WEATHER_ASK, "max_tokens": 64}
    (call,) = library.completion(**fields, tools=tools).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == CITY
    return {"version": version("litellm"), "tried": "completion, streams, tools"}


def langchain(base_url: str, model: str, caller: str) -> dict[str, Any]:
    from importlib.metadata import version

    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    fields: dict[str, Any] = {"base_url": f"{base_url}/v1", "api_key": KEY, "temperature": 0}
    chat = ChatOpenAI(**fields, model=model, max_tokens=12)
    whole = chat.invoke(ASK[0]["content"]).content
    assert "".join(str(part.content) for part in chat.stream(ASK[0]["content"])) == whole
    bound = ChatOpenAI(**fields, model=caller, max_tokens=64).bind_tools(
        [{"type": "function", "function": TOOL}]
    )
    asked = [HumanMessage(WEATHER_ASK[0]["content"])]
    said = bound.invoke(asked)
    (call,) = said.tool_calls
    assert (call["name"], call["args"]) == ("weather", CITY)
    assert bound.invoke([*asked, said, ToolMessage("sunny", tool_call_id=call["id"])])
    return {"version": version("langchain-openai"), "tried": "invoke, stream, tools both ways"}


def inspect(base_url: str, model: str, caller: str) -> dict[str, Any]:
    from importlib.metadata import version

    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    samples = [
        Sample(input="What is the capital of France? Answer in one word.", target="Paris"),
        Sample(input="What is the capital of Italy? Answer in one word.", target="Rome"),
    ]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(
            task,
            model=f"openai-api/tinkex/{model}",
            model_base_url=f"{base_url}/v1",
            model_args={"api_key": KEY},
            temperature=0,
            max_tokens=16,
            log_dir=folder,
            display="none",
        )
    assert log.status == "success", log.error
    assert 0 <= log.results.scores[0].metrics["accuracy"].value <= 1
    return {"version": version("inspect-ai"), "tried": "an eval with `generate` and `includes`"}


def lm_eval(base_url: str, model: str, caller: str) -> dict[str, Any]:
    """A multiple-choice task on made data, whose numbers are compared with `compute_logprobs`."""
    from importlib.metadata import version

    import lm_eval as library
    from lm_eval.tasks import TaskManager

    rows = [
        {"question": "The capital of France is", "options": ["Paris", "a blue cheese"], "right": 0},
        {"question": "Two plus two is", "options": ["seven hundred", "four"], "right": 1},
        {"question": "Grüße aus", "options": ["Zürich", "Bern"], "right": 0},
    ]
    with tempfile.TemporaryDirectory() as folder:
        data, task = Path(folder) / "made.jsonl", Path(folder) / "made.yaml"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task.write_text(
            f"""
task: made
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: right
metric_list: [{{metric: acc}}]
"""
        )
        arguments = {
            "model": model,
            "base_url": f"{base_url}/v1/completions",
            "tokenizer": model,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
        }
        found = library.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=["made"],
            task_manager=TaskManager(include_path=folder),
            bootstrap_iters=0,
        )
    measured = [
        {"context": context, "answer": answer, "loglikelihood": float(response[0])}
        for sample in found["samples"]["made"]
        for (context, answer), response in zip(
            _pairs(sample["arguments"]), sample["filtered_resps"], strict=True
        )
    ]
    assert len(measured) == 6
    assert 0 <= found["results"]["made"]["acc,none"] <= 1
    tried = "`local-completions`, a multiple-choice task; loglikelihoods equal `compute_logprobs`"
    return {"version": version("lm-eval"), "tried": tried, "measured": measured}


def _pairs(arguments: Any) -> list[tuple[str, str]]:
    """Context and continuation of each request; written as a dict or as a list by version."""
    if isinstance(arguments, dict):
        return [(one["arg_0"], one["arg_1"]) for one in arguments.values()]
    return [(one[0], one[1]) for one in arguments]


SCENARIOS = {
    "openai": openai,
    "anthropic": anthropic,
    "litellm": litellm,
    "langchain": langchain,
    "inspect": inspect,
    "lm-eval": lm_eval,
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:5])))

"""What each foreign client does against a server; runs inside the client's own environment.

`python scenarios.py CLIENT BASE_URL MODEL` prints one JSON object of facts; a failed check is an
AssertionError and a non-zero exit.
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
KEY = "tml-client"


def openai(base_url: str, model: str) -> dict[str, Any]:
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
    tools = [{"type": "function", "function": TOOL}]
    with_tools = client.chat.completions.create(**fields, tools=tools)
    assert with_tools.choices[0].finish_reason in ("stop", "length", "tool_calls")
    response = client.responses.create(model=model, input="Say hi", max_output_tokens=8)
    assert response.output_text

    async def ask() -> str:
        async with library.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=KEY) as other:
            answer = await other.chat.completions.create(**fields)
            return answer.choices[0].message.content or ""

    assert asyncio.run(ask()) == text
    try:
        client.chat.completions.create(**{**fields, "model": "nobody"})
    except library.NotFoundError as exc:
        refused = exc.body["code"]
    return {"version": library.__version__, "text": text, "refused": refused}


def anthropic(base_url: str, model: str) -> dict[str, Any]:
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
    tool = {"name": TOOL["name"], "input_schema": TOOL["parameters"]}
    client.messages.create(**fields, tools=[tool], system="Be brief.")
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
    return {"version": library.__version__, "text": text, "refused": refused}


def litellm(base_url: str, model: str) -> dict[str, Any]:
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
    return {"version": version("litellm"), "text": text}


def langchain(base_url: str, model: str) -> dict[str, Any]:
    from importlib.metadata import version

    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{base_url}/v1", api_key=KEY, model=model, temperature=0, max_tokens=12
    )
    whole = chat.invoke(ASK[0]["content"]).content
    assert "".join(str(part.content) for part in chat.stream(ASK[0]["content"])) == whole
    return {"version": version("langchain-openai"), "text": whole}


def inspect(base_url: str, model: str) -> dict[str, Any]:
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
    score = log.results.scores[0].metrics["accuracy"].value
    return {"version": version("inspect-ai"), "accuracy": score}


def lm_eval(base_url: str, model: str) -> dict[str, Any]:
    """A loglikelihood task on made data; the test compares its numbers with `compute_logprobs`."""
    from importlib.metadata import version

    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    harness = LocalCompletionsAPI(
        model=model,
        base_url=f"{base_url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(Path(model)),
        header={"Authorization": f"Bearer {KEY}"},
    )
    pairs = [("The capital of France is", " Paris"), ("Two plus two is", " four")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    found = harness.loglikelihood(requests)
    return {"version": version("lm-eval"), "loglikelihoods": [float(one[0]) for one in found]}


SCENARIOS = {
    "openai": openai,
    "anthropic": anthropic,
    "litellm": litellm,
    "langchain": langchain,
    "inspect": inspect,
    "lm-eval": lm_eval,
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](sys.argv[2], sys.argv[3])))

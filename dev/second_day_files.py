"""The files that a user of the second day has: rows, pairs, prompts, rewards, small programs."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = [
    {"prompt": f"Where is order {number}?", "completion": f"Order {number} is on its way."}
    for number in range(100, 140)
]
PAIRS = [
    {"prompt": f"Say {word}.", "chosen": f"{word}!", "rejected": f"I would rather not say {word}."}
    for word in ("yes", "no", "please", "thanks", "good morning", "good night", "maybe", "never")
]
PROMPTS = [{"prompt": f"Count to {number}."} for number in range(2, 10)]

REWARDS = '''\
"""Rewards as TRL's examples write them."""


def brief(prompts, completions, **kwargs):
    assert all(prompt.startswith("Count") for prompt in prompts), prompts
    return [-len(completion) / 100 for completion in completions]


def digits(completions, **kwargs):
    return [sum(letter.isdigit() for letter in completion) / 10 for completion in completions]
'''

ASK = '''\
"""Ask a model of the server by its name, as any OpenAI client does."""
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="tml-any")
answer = client.chat.completions.create(
    model=sys.argv[2], messages=[{"role": "user", "content": "Where is order 7?"}], max_tokens=8
)
print(answer.model, "said", repr(answer.choices[0].message.content))
'''

AUTO_PEFT = '''\
"""Open an export as any PEFT program does."""
import sys
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
ids = tokenizer("Where is order 7?", return_tensors="pt")
made = model.generate(**ids, min_new_tokens=4, max_new_tokens=4)
print("generated", made.shape[1] - ids["input_ids"].shape[1])
'''

MERGED = '''\
"""Open a merged export as any program of Hugging Face does."""
import sys
from transformers import AutoModelForCausalLM

print("loaded", type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
'''

CONNECT = '''\
"""Connect to a server, given by name of argument and address."""
import sys
from tinkex import ServiceClient

service = ServiceClient(**{sys.argv[1]: sys.argv[2]})
print(service.create_lora_training_client("tinkex/SmolLM2-135M-Instruct-Q4", rank=2).model_id)
'''

MANY_MODELS = '''\
"""Make more models than the server allows."""
import sys
from tinkex import ServiceClient

service = ServiceClient(base_url=sys.argv[1])
for number in range(3):
    service.create_lora_training_client("tinkex/SmolLM2-135M-Instruct-Q4", rank=2).model_id
    print("model", number)
'''


def write(folder: Path) -> None:
    """Put all of them into a folder."""
    for name, rows in (("rows", ROWS), ("pairs", PAIRS), ("prompts", PROMPTS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    programs = {
        "rewards": REWARDS,
        "ask": ASK,
        "auto_peft": AUTO_PEFT,
        "merged": MERGED,
        "connect": CONNECT,
        "many_models": MANY_MODELS,
    }
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)

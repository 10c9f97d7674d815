"""Local stand-ins for what recipes fetch from a hub: data sets and a tokenizer.

`datasets.load_dataset("openai/gsm8k", "main")` and `AutoTokenizer.from_pretrained("Qwen/...")` take
a folder of that name in the working directory before they ask a hub, so a program that runs in
`make_workplace` needs neither the network nor a change. The rows are few, short and invented.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
# Qwen's tokenizers have these as tokens and their renderers need them; ours has two to spare.
RENAMED = {"<repo_name>": "<think>", "<reponame>": "</think>"}
Row = dict[str, Any]


def _messages(i: int) -> Row:
    user = {"role": "user", "content": f"Say the number {i}."}
    return {"messages": [user, {"role": "assistant", "content": f"The number is {i}."}]}


def _gsm8k(i: int) -> Row:
    return {"question": f"What is {i} plus 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}


def _problem(i: int) -> Row:
    solution = rf"The sum is \boxed{{{i + 2}}}."
    return {"problem": f"What is {i} + 2?", "answer": str(i + 2), "solution": solution}


def _deepmath(i: int) -> Row:
    return {"question": f"What is {i} + 3?", "final_answer": str(i + 3)}


def _comparison(i: int) -> Row:
    said = f"\n\nHuman: Say {i}.\n\nAssistant: "
    return {"chosen": f"{said}Gladly: {i}.", "rejected": f"{said}No."}


def _thoughts(i: int) -> Row:
    turns = (("human", f"Count to {i}."), ("gpt", " ".join(map(str, range(i + 1)))))
    return {"conversations": [{"from": who, "value": said} for who, said in turns]}


def _multiple_choice(i: int) -> Row:
    choices = {"text": [str(i), str(i + 1)], "label": ["A", "B"]}
    about = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices"}
    return {**about, "question": f"Which is {i}?", "choices": choices, "answerKey": "A"}


def _tool_use(i: int) -> Row:
    return {"instruction": f"Call tool {i}.", "output": f"Action: tool_{i}"}


def _text(i: int) -> Row:
    return {"text": f"Page {i} says that the river is wide and the road is long. " * 40}


def _rubric(i: int) -> Row:
    rubric = {
        "rubric_str": f"Is the answer {i + 4}?",
        "extraction_regex": "<score>(.*?)</score>",
        "grader_output_format_instruction": "Write <score>1</score> or <score>0</score>.",
    }
    return {
        "convo": [{"role": "user", "content": f"What is {i} + 4?"}],
        "rubric_items": [rubric],
    }


# Name of the data set -> (row maker, {configuration: {split: number of rows}}).
_ONE = {"default": {"train": 32, "test": 8}}
DATASETS: dict[str, tuple[Callable[[int], Row], dict[str, dict[str, int]]]] = {
    # Two recipes (this and gsm8k) have a batch size of 128 that no argument changes.
    "HuggingFaceH4/no_robots": (_messages, {"default": {"train": 144, "test": 8}}),
    # The recipe sets 1,024 rows aside before it trains on the others.
    "allenai/tulu-3-sft-mixture": (_messages, {"default": {"train": 1056}}),
    "openai/gsm8k": (_gsm8k, {"main": {"train": 144, "test": 8}}),
    "HuggingFaceH4/MATH-500": (_problem, {"default": {"test": 4}}),
    "EleutherAI/hendrycks_math": (_problem, {"algebra": {"train": 32, "test": 8}}),
    "POLARIS-Project/Polaris-Dataset-53K": (_problem, {"default": {"train": 32}}),
    "zwhe99/DeepMath-103K": (_deepmath, {"default": {"train": 32}}),
    "Anthropic/hh-rlhf": (_comparison, _ONE),
    "open-thoughts/OpenThoughts3-1.2M": (_thoughts, {"default": {"train": 32}}),
    "hicai-zju/SciKnowEval": (_multiple_choice, {"default": {"test": 32}}),
    "tangqiaoyu/ToolAlpaca": (_tool_use, {"default": {"train": 32}}),
    "Salesforce/wikitext": (_text, {"wikitext-103-raw-v1": {"train": 64}}),
}


# Files that recipes would make with a large model first.
FILES = {"conversations.jsonl": _messages, "rubric.jsonl": _rubric}


def make_workplace(folder: Path, tokenizer: Path, *model_names: str) -> None:
    """Fill `folder` with every data set, and with the tokenizer under each model's name."""
    for name in model_names:
        (folder / name).mkdir(parents=True)
        for file in TOKENIZER_FILES:
            text = (tokenizer / file).read_text()
            for ours, theirs in RENAMED.items():
                text = text.replace(ours, theirs)
            (folder / name / file).write_text(text)
    for name, (row, configurations) in DATASETS.items():
        _write_dataset(folder / name, row, configurations)
    for name, row in FILES.items():
        (folder / name).write_text(_lines(row, 32))


def _write_dataset(
    place: Path, row: Callable[[int], Row], configurations: dict[str, dict[str, int]]
) -> None:
    """JSON lines for each split, and the card that says which file is which."""
    card = ["---", "configs:"]
    for configuration, splits in configurations.items():
        card += [f"- config_name: {configuration}", "  data_files:"]
        for split, count in splits.items():
            file = place / configuration / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_lines(row, count))
            card += [f"  - split: {split}", f"    path: {configuration}/{split}.jsonl"]
    (place / "README.md").write_text("\n".join([*card, "---", ""]))


def _lines(row: Callable[[int], Row], count: int) -> str:
    return "".join(json.dumps(row(i)) + "\n" for i in range(count))

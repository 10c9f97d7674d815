"""A throw-away environment with tinker-cookbook and this SDK, and a way to run its recipes.

It lies in the cache folder (`tests/harness/cached_venv.py`). The official `tinker` is not in it:
what the cookbook imports under that name is ours, through `tinkex.compat`.

    python tests/compat/cookbook.py http://127.0.0.1:8765     # runs all three programs
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
from cached_venv import cached_python

ROOT = Path(__file__).parents[2]
VERSION = "0.5.8"
MODEL = "tinkex/SmolLM2-135M-Instruct-Q4"
# The chat program takes its renderer from the model's name, so the server lends it a known one.
ALIAS = "Qwen/Qwen3-4B-Instruct-2507"
_NEEDS = (
    "aiohttp anyio blobfile chz cloudpickle datasets huggingface-hub math-verify pillow pylatexenc "
    "pyrage safetensors sympy termcolor tiktoken tml-renderers tqdm transformers>=4.57.6,<=5.5.4"
).split()
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def cookbook_python() -> Path:
    """The interpreter of the environment; builds it first (minutes) when it is absent."""
    return cached_python(
        f"cookbook-{VERSION}",
        ("torch", "-e", str(ROOT), *_NEEDS),
        ("--no-deps", f"tinker-cookbook=={VERSION}"),
    )


def make_workplace(folder: Path, tokenizer: Path) -> None:
    """A working directory with a tokenizer folder named like each model: no hub is asked."""
    for name in (MODEL, ALIAS):
        place = folder / name
        place.mkdir(parents=True)
        for file in _TOKENIZER_FILES:
            shutil.copy(tokenizer / file, place / file)


def run(
    base_url: str, folder: Path, module: str, *args: str, stdin: str = "", timeout_s: float = 1500
) -> subprocess.CompletedProcess[str]:
    """`python -m tinkex.compat -m tinker_cookbook.MODULE ARGS...` in `folder`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
    env |= {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": "tml-cookbook", "HF_HUB_OFFLINE": "1"}
    command = [str(cookbook_python()), "-m", "tinkex.compat", "-m", f"tinker_cookbook.{module}"]
    return subprocess.run(
        [*command, *args],
        cwd=folder,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def example_conversations() -> Path:
    code = "import tinker_cookbook as c, os; print(os.path.dirname(c.__file__))"
    command = [str(cookbook_python()), "-m", "tinkex.compat", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return Path(done.stdout.strip()) / "example_data" / "conversations.jsonl"


def chat_sl(base_url: str, folder: Path, log: Path) -> subprocess.CompletedProcess[str]:
    return run(
        base_url,
        folder,
        "recipes.chat_sl.train",
        f"model_name={MODEL}",
        "renderer_name=qwen3_instruct",
        f"dataset={example_conversations()}",
        f"log_path={log}",
        "behavior_if_log_dir_exists=delete",
        "max_length=256",
        "batch_size=4",
        "max_steps=3",
        "lora_rank=8",
        "eval_every=0",
        "save_every=0",
    )


def math_rl(base_url: str, folder: Path, log: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run(
        base_url,
        folder,
        "recipes.math_rl.train",
        "env=arithmetic",
        f"model_name={MODEL}",
        "renderer_name=qwen3_instruct",
        f"log_path={log}",
        "behavior_if_log_dir_exists=delete",
        "group_size=4",
        "groups_per_batch=4",
        "lora_rank=8",
        "eval_every=0",
        "save_every=0",
        *(more or ("max_steps=2",)),
    )


def chat(base_url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(
        base_url,
        folder,
        "chat_app.tinker_chat_cli",
        f"base_model={ALIAS}",
        "max_tokens=12",
        "temperature=0.0",
        stdin="What is the capital of France?\nquit\n",
    )


def main(base_url: str) -> None:
    from tinkex.engine.model import default_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_workplace(folder, default_model.folder())
        for done in (
            chat_sl(base_url, folder, folder / "sl"),
            math_rl(base_url, folder, folder / "rl"),
            chat(base_url, folder),
        ):
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
            print(f"exit code {done.returncode}")


if __name__ == "__main__":
    main(sys.argv[1])

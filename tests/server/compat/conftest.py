"""A server on a tiny real model that reads and writes bytes, and a trained adapter on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from tiny_llama import tiny_llama

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "chat"))
import chat_models

KEY, OTHER_KEY = "tml-one", "tml-two"
LOOPS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "<|im_start|>{{ messages }}"
)


@pytest.fixture(scope="session")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("talking")
    tokenizer = chat_models.tokenizer(chat_models.QWEN3)
    tiny_llama(
        folder,
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_models.QWEN3)
    return folder


@pytest.fixture(scope="session")
def world(
    talking_model: Path, start_server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """`base_url`, `model`, and `path`: a sampler checkpoint of an adapter that was trained hard."""
    import tinkex

    folder = tmp_path_factory.mktemp("compat")
    flags = ("--model", str(talking_model), "--deterministic")
    keys = ("--api-key", f"{KEY}=ann", "--api-key", f"{OTHER_KEY}=ben")
    with start_server(folder, *flags, *keys) as base_url:
        service = tinkex.ServiceClient(base_url=base_url, api_key=KEY)
        training = service.create_lora_training_client(
            base_model=str(talking_model), rank=4, seed=0
        )
        tokens = list(b"abcdefgh" * 4)
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for _ in range(8):
            training.forward_backward([datum], "cross_entropy").result()
            training.optim_step(tinkex.AdamParams(learning_rate=0.02)).result()
        path = training.save_weights_for_sampler("trained").result().path
        yield SimpleNamespace(
            base_url=base_url, model=str(talking_model), path=path, service=service
        )
        service.close()


@pytest.fixture(scope="module")
def slow_server(
    start_server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A server that needs minutes for a long answer and has one place; `loops` never renders."""
    folder = tmp_path_factory.mktemp("slow")
    models = {"talks": chat_models.QWEN3, "loops": LOOPS}
    for name, template in models.items():
        (folder / name).mkdir()
        inner = chat_models.tokenizer(template).backend_tokenizer
        inner.save(str(folder / name / "tokenizer.json"))
        (folder / name / "chat_template.jinja").write_text(template)
    flags = [flag for name in models for flag in ("--model", str(folder / name))]
    (folder / "one.toml").write_text("max_running_samples = 1\n")
    engine = ("--engine", "toy:token_latency_s=0.2", "--config", str(folder / "one.toml"))
    with start_server(folder, *engine, *flags) as base_url:
        paths = {name: str(folder / name) for name in models}
        yield SimpleNamespace(base_url=base_url, **paths)


@pytest.fixture
def api(world: SimpleNamespace) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=world.base_url, headers=headers, timeout=60) as client:
        yield client

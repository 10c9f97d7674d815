"""A server on a tiny real model that reads and writes bytes, and a trained adapter on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "chat"))
import chat_models

KEY, OTHER_KEY = "tml-one", "tml-two"


@pytest.fixture(scope="session")
def talking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a byte-level tokenizer and a chat template."""
    import transformers

    folder = tmp_path_factory.mktemp("talking")
    tokenizer = chat_models.tokenizer(chat_models.QWEN3)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
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


@pytest.fixture
def api(world: SimpleNamespace) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=world.base_url, headers=headers, timeout=60) as client:
        yield client

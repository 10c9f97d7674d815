"""`train rl --router-replay` holds each token to the experts that its sample passed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
from server_process import ServerProcess

from tinkex import ServiceClient
from tinkex.recipes import rl
from tinkex.recipes.episodes import Episode, Question, Turn


def episode(num_tokens: int) -> Episode:
    tokens = list(range(num_tokens))
    return Episode(
        question=Question(tokens=tokens, row={}, line=1),
        tokens=tokens,
        logprobs=[0.0] * num_tokens,
        is_sampled=[True] * num_tokens,
    )


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, 1, 1)


def test_what_a_turn_recorded_stays_when_the_next_one_reads_it_again():
    one = episode(6)
    one.route(rows(1, 2, -1))
    one.route(rows(7, 8, 9, 10, -1))
    assert one.experts.ravel().tolist() == [1, 2, 9, 10, -1]
    carried = rl.datum_of(one, [1.0] * 6).loss_fn_inputs["routed_experts"].array
    assert carried.ravel().tolist() == [1, 2, 9, 10, -1]  # five of six tokens are input
    one.read([6, 7])
    longer = rl.datum_of(one, [1.0] * 8).loss_fn_inputs["routed_experts"].array
    assert longer.ravel().tolist() == [1, 2, 9, 10, -1, -1, -1]
    assert "routed_experts" not in rl.datum_of(episode(3), [1.0] * 3).loss_fn_inputs


class Twice:
    """Asks once more; longer answers are better."""

    def __init__(self, row):
        self.row, self.turns = row, 0

    def start(self):
        return [{"role": "user", "content": self.row["prompt"]}]

    def step(self, answer):
        self.turns += 1
        return Turn(reward=float(len(answer)), reply="more" if self.turns < 2 else None)


@pytest.fixture
def mixture(tmp_path, default_model_dir) -> Path:
    """A tiny mixture that reads and writes text."""
    import torch
    import transformers

    config = transformers.OlmoeConfig(
        vocab_size=49152, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "mixture"
    transformers.OlmoeForCausalLM(config).save_pretrained(folder)
    for file in default_model_dir.glob("*token*"):
        shutil.copy(file, folder)
    for name in ("vocab.json", "merges.txt", "chat_template.jinja"):
        if (default_model_dir / name).is_file():
            shutil.copy(default_model_dir / name, folder)
    return folder


@pytest.mark.timeout(1200)
def test_an_rl_run_trains_on_the_experts_of_its_samples(tmp_path, mixture, monkeypatch):
    made, plain = [], rl.datum_of

    def watched(*args):
        made.append(plain(*args))
        return made[-1]

    monkeypatch.setattr(rl, "datum_of", watched)
    options = ["--engine", "torch", "--device", "cpu", "--model", str(mixture)]
    with ServerProcess(tmp_path / "server", *options) as server:
        with ServiceClient(base_url=server.base_url, api_key="tml-x") as service:
            config = rl.RlConfig(
                log_dir=str(tmp_path / "log"), model=str(mixture), rank=4, steps=2,
                prompts_per_step=2, group_size=2, max_tokens=6, max_turns=2, eval_share=0.0,
                router_replay=True,
            )  # fmt: skip
            prompts = [{"prompt": text} for text in ("one", "two", "three")]
            rl.train(
                config, service, Twice, prompts, on_step=lambda *_: None, on_note=lambda _: None
            )
    assert made
    for datum in made:
        words = datum.loss_fn_inputs["routed_experts"].array
        assert words.shape == (datum.model_input.length, 2, 1)
        assert (words != -1).all()  # the second turn has computed all that the first one left

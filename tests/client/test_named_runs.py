"""What the SDK says of a run to the server: its name, its settings, what it goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datums import datum

import tinkex
from tinkex import AdamParams, InvalidInputError


@pytest.fixture
def service(toy_server: str) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(
        base_url=toy_server, api_key="tml-names", display_name="loop"
    ) as client:
        yield client


def run_of(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient
) -> tinkex.types.TrainingRun:
    return service.create_rest_client().get_training_run(training.model_id).result()


def train(training: tinkex.TrainingClient, steps: int) -> None:
    for _ in range(steps):
        training.train_step(
            [datum([1, 2, 3])], "cross_entropy", AdamParams(learning_rate=0.01)
        ).result()


def test_two_runs_of_one_session_have_names_of_their_own(service: tinkex.ServiceClient) -> None:
    named = service.create_lora_training_client("toy", rank=4, name="caps")
    other = service.create_lora_training_client(
        "toy", rank=4, user_metadata={"name": "by metadata"}
    )
    unnamed = service.create_lora_training_client("toy", rank=4)
    names = [run_of(service, training).name for training in (named, other, unnamed)]
    assert names == ["caps", "by metadata", "loop"]
    again = service.create_training_client_from_state(named.save_state("a").result().path, name="b")
    run = run_of(service, again)
    assert (run.name, run.made_from) == ("b", f"tinker://{named.model_id}/weights/a")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "tinker://x"}, "tinker://"),
        ({"name": "a\nb"}, "one line"),
        ({"name": "a", "user_metadata": {"name": "b"}}, "give one"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_before_anything_is_sent(
    service: tinkex.ServiceClient, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        service.create_lora_training_client("toy", rank=4, **given)


def test_settings_add_up_and_what_is_not_json_is_kept_as_text(
    service: tinkex.ServiceClient,
) -> None:
    training = service.create_lora_training_client("toy", rank=4)
    training.log_settings({"lr": 1e-3, "betas": (0.9, 0.95), "data": Path("a/b.jsonl")}).result()
    training.log_settings({"lr": 5e-4, "kl": None}).result()
    kept = {"lr": 5e-4, "betas": [0.9, 0.95], "data": "a/b.jsonl", "kl": None}
    assert run_of(service, training).settings == kept
    with pytest.raises(InvalidInputError, match="finite"):
        training.log_settings({"lr": float("nan")})


def test_a_resumed_run_goes_on_from_the_run_of_its_checkpoint(
    service: tinkex.ServiceClient,
) -> None:
    """Its optimizer steps are numbered on, whatever the loop calls a step."""
    first = service.create_lora_training_client("toy", rank=4, name="orders")
    train(first, 4)
    path = first.save_state("half").result().path
    train(first, 3)  # lost: the run is resumed from the checkpoint
    second = service.create_training_client_from_state_with_optimizer(path, continues_at=2)
    train(second, 2)
    run = run_of(service, second)
    assert (run.name, run.num_steps) == ("orders", 6)
    assert run.continues == tinkex.types.RunReference(run_id=first.model_id, step=2)
    assert run_of(service, first).continued_by == second.model_id
    branch = service.create_training_client_from_state_with_optimizer(path)
    assert run_of(service, branch).continues is None

"""What is wrong with a call is said before anything travels, with path, value and fix (R29)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hostile import Network, Server
from virtual_time import run_virtual

import tinkex
from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.rest.rest_client import RestClient
from tinkex.client.sampling.sampling_client import SamplingClient
from tinkex.client.session.holder import Holder
from tinkex.client.training.training_client import TrainingClient

DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
RL = types.Datum(
    types.ModelInput.from_ints([1, 2]),
    {"target_tokens": [2, 3], "logprobs": [-1.0], "advantages": [1.0, 1.0]},
)
UNSHIFTED = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [1, 2, 3]})
BATCHED = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": np.array([[2, 3]])})
SHORT = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0]})
PARAMS = types.SamplingParams(max_tokens=1)
PROMPT = types.ModelInput.from_ints([1])


def holder() -> Holder:
    class Untouched:
        async def send(self, *args: Any) -> Any:
            raise AssertionError("something was sent")

        async def close(self) -> None: ...

    config = ClientConfig(base_url="http://nowhere.test", api_key="tml-k")
    return Holder(config, make_backend=lambda _: Untouched())


def training() -> TrainingClient:
    return TrainingClient(holder(), 0, "S:train:0")


def sampling() -> SamplingClient:
    return SamplingClient(holder(), "S:sample:0")


def rest() -> RestClient:
    return RestClient(holder())


def adam(**numbers: float) -> types.AdamParams:
    return types.AdamParams(**numbers)


MISTAKES: list[tuple[Any, str]] = [
    (
        lambda: training().forward([DATUM], "crossentropy"),
        "loss_fn: unknown loss 'crossentropy'; known: cross_entropy",
    ),
    (lambda: training().forward([], "cross_entropy"), "data: a batch needs at least one datum"),
    (lambda: training().forward(DATUM, "cross_entropy"), "data: expected a list of Datum, got Dat"),
    (lambda: training().forward(None, "cross_entropy"), "data: expected a list of Datum, got None"),
    (lambda: training().forward([DATUM], "cross_entropy", 3), "loss_fn_config: expected a dict"),
    (
        lambda: training().forward([UNSHIFTED], "cross_entropy"),
        r"target_tokens: 3 targets for 2 tokens of input; .* input tokens\[:-1\]",
    ),
    (
        lambda: training().forward([BATCHED], "cross_entropy"),
        r"target_tokens: has shape \[1, 2\]: .* Take its first row, \[0\]",
    ),
    (
        lambda: types.Datum("hello", {}),
        r"model_input: expected a ModelInput, got str. Use ModelInput.from_ints\(tokens\)",
    ),
    (
        lambda: types.Datum(types.ModelInput.empty(), {"labels": [1]}),
        "loss_fn_inputs.labels: no named loss has such an input; they have target_tokens, weights",
    ),
    (
        lambda: training().forward([SHORT], "cross_entropy"),
        r"weights: expected as many numbers as target_tokens \(2\), got 1",
    ),
    (
        lambda: training().optim_step(1e-4),
        r"optim_params: expected AdamParams\(learning_rate=...\)",
    ),
    (lambda: adam(learning_rate=float("nan")), "learning_rate: must be a finite number, got nan"),
    (lambda: training().save_state("a", user_metadata={"step": 3}), "'step' must be text, got int"),
    (lambda: training().forward(["x"], "cross_entropy"), r"data\[0\]: expected a Datum, got str"),
    (
        lambda: training().forward([DATUM], "ppo"),
        r"data\[0\].loss_fn_inputs: loss 'ppo' needs logprobs, advantages; given: target_tokens",
    ),
    (lambda: training().forward([DATUM, RL], "cispo"), r"data\[0\].loss_fn_inputs"),
    (
        lambda: training().forward([RL], "ppo"),
        r"data\[0\].loss_fn_inputs.logprobs: expected as many numbers as target_tokens \(2\)",
    ),
    (
        lambda: training().forward([DATUM], "cross_entropy", {"a": None}),
        "loss_fn_config.a: expected a number or text",
    ),
    (lambda: training().forward([DATUM], "cross_entropy", {"a": float("nan")}), "finite"),
    (lambda: training().forward([DATUM], "ppo", {"a": 10**400}), "a: expected a finite number"),
    (lambda: training().forward([DATUM], "ppo", {"a": 10**5000}), "a: .* too long to be shown"),
    (lambda: training().forward([DATUM], "custom"), "loss_id"),
    (lambda: training().optim_step(), "exactly one of optim_params and adam_params"),
    (lambda: training().optim_step(adam(), adam_params=adam()), "exactly one"),
    (
        lambda: training().optim_step(adam(learning_rate=-1e-4)),
        "learning_rate: must be at least 0, got -0.0001",
    ),
    (
        lambda: training().optim_step(adam(beta2=1.0)),
        "beta2: must be below 1",
    ),
    (lambda: training().optim_step(adam(eps=0.0)), "eps: must be at least 1e-30"),
    (
        lambda: training().train_step([DATUM], "cross_entropy", adam(beta1=-0.1)),
        "beta1",
    ),
    (lambda: training().save_state("a/b"), "name: checkpoint name 'a/b' is not allowed"),
    (lambda: training().save_state("a", ttl_seconds=60), "ttl_seconds: must be between 3600"),
    (lambda: training().save_state("a", ttl_seconds=10**10), "ten years"),
    (
        lambda: training().load_state("tinker://run/nowhere/x"),
        r"path: expected tinker://RUN_ID/weights\|sampler_weights",
    ),
    (lambda: training().load_state("run/weights/x"), "path: expected tinker://RUN_ID/weights"),
    (lambda: sampling().sample([1], 1, PARAMS), "prompt: expected a ModelInput, got list"),
    (
        lambda: sampling().sample(PROMPT, 0, PARAMS),
        "num_samples: must be at least 1 and at most 4096, got 0",
    ),
    (lambda: sampling().sample(PROMPT, 1, None), "sampling_params: expected SamplingParams"),
    (
        lambda: sampling().sample(PROMPT, 1, PARAMS, prompt_logprobs_last_n=2),
        "include_prompt_logprobs in the SDK",
    ),
    (lambda: SamplingClient.create(holder()), "give model_path or base_model"),
    (lambda: SamplingClient.create(holder(), model_path="/tmp/x"), "starts with tinker://"),
    (
        lambda: rest().list_training_runs(access_scope="all"),
        "access_scope: must be 'owned' or 'accessible'",
    ),
    (lambda: rest().list_training_runs(limit=-1), "limit: must be a whole number from 0"),
    (lambda: rest().get_training_run("a/../b"), "training_run_id: expected an id"),
    (lambda: rest().delete_checkpoint("run", "../../etc"), "checkpoint_id: expected"),
    (lambda: rest().get_external_weights_urls("tinker://run/weights/x"), "external_weights"),
    (lambda: rest().set_checkpoint_ttl_from_tinker_path("tinker://r/weights/x", 5), "ttl_seconds"),
    (lambda: tinkex.AdminClient(holder()).get_audit_log("everything"), "event_type"),
    (lambda: tinkex.AdminClient(holder()).get_billing_usage("then", "now"), "starting_on"),
]


@pytest.mark.parametrize(
    ("call", "message"), MISTAKES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_mistake_is_named_before_anything_is_sent(call: Any, message: str) -> None:
    with pytest.raises(tinkex.InvalidInputError) as caught:
        call()
    assert re.search(message, str(caught.value)), str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_refused_call_takes_no_number() -> None:
    """The call after a refused one is the model's next request, without a gap."""

    async def main() -> list[tuple[str, int]]:
        server = Server()
        config = ClientConfig(base_url="http://gap.test", api_key="tml-k", telemetry=False)
        service = tinkex.ServiceClient(config=config)
        import random

        service._holder = Holder(
            config, make_backend=Network(server, random.Random(0), rate=0.0).make_backend
        )
        client = await service.create_lora_training_client_async("m", rank=4)
        client.forward([DATUM], "cross_entropy")
        with pytest.raises(tinkex.InvalidInputError):
            client.optim_step(adam(learning_rate=-1.0))
        await client.optim_step(adam())
        await service.close("success")
        return server.arrivals

    assert run_virtual(main()) == [("S:train:0", 1), ("S:train:0", 2)]


@pytest.mark.parametrize("paths", [None, "tinker://r/sampler_weights/a", 5])
def test_sources_that_are_no_list_are_refused_by_name(paths: Any) -> None:
    rest = RestClient(holder())
    with pytest.raises(tinkex.InvalidInputError, match="source_paths: must be a list, got "):
        rest.interpolate_checkpoints(paths, [0.5, 0.5])


def test_tokens_that_are_scored_are_given_by_the_names_of_models() -> None:
    service = tinkex.ServiceClient(base_url="http://127.0.0.1:1", api_key="tml-k")
    with pytest.raises(tinkex.InvalidInputError, match="scored_tokens: must be a dictionary"):
        service.estimate("m", scored_tokens=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", [None, "", 5])
def test_a_reference_that_is_none_is_refused_by_its_name(reference: Any) -> None:
    """Not told as a missing input of the loss that it is turned into."""
    training = TrainingClient(holder(), 0, "S:train:0")
    with pytest.raises(tinkex.InvalidInputError, match="reference_model_path: must be a tinker://"):
        training.forward_backward_reverse_kl([DATUM], reference)


def test_a_model_without_any_trained_layer_is_refused() -> None:
    service = tinkex.ServiceClient(base_url="http://127.0.0.1:1", api_key="tml-k")
    with pytest.raises(tinkex.InvalidInputError, match="at least one of train_mlp"):
        service.create_lora_training_client(
            "m", train_mlp=False, train_attn=False, train_unembed=False
        )
    with pytest.raises(
        tinkex.InvalidInputError, match="rank: must be a whole number of at least 1, got 0"
    ):
        service.create_lora_training_client("m", rank=0)
    with pytest.raises(tinkex.ConfigError, match="TINKER_PROJECT_ID"):
        service.copy_weights("tinker://r/weights/x")

"""Every sample says which weights made it, and a training step how old its samples are."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from datums import datum

import tinkex
from tinkex import types
from tinkex.client.training.sample_age import StepCount, keep_fresh
from tinkex.errors import InvalidInputError

ADAM = types.AdamParams(learning_rate=0.1)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4, seed=1)


@pytest.fixture(scope="module")
def service(toy_server: str) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=toy_server, api_key="tml-x") as service:
        yield service


def _training(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client("toy", rank=4, seed=1).result()


def _sample(client: tinkex.SamplingClient) -> types.SampledSequence:
    return client.sample(PROMPT, 1, PARAMS).result().sequences[0]


def _step(training: tinkex.TrainingClient, **more: object) -> dict[str, float]:
    data = [datum([1, 2, 3, 4]), datum([2, 3, 4, 5])]
    step = training.train_step(data, "cross_entropy", ADAM, **more)  # type: ignore[arg-type]
    return step.result().metrics


def test_a_sequence_says_which_weights_made_it(service: tinkex.ServiceClient) -> None:
    training = _training(service)
    first = _sample(training.save_weights_and_get_sampling_client().result())
    _step(training)
    second = _sample(training.save_weights_and_get_sampling_client().result())
    path = training.save_weights_for_sampler("named").result().path
    named = _sample(service.create_sampling_client(model_path=path).result())
    assert first.snapshot is not None
    assert second.snapshot is not None
    assert named.snapshot is not None
    assert (first.snapshot.step, second.snapshot.step, named.snapshot.step) == (0, 1, 1)
    assert first.snapshot.content != second.snapshot.content
    assert named.snapshot.content == second.snapshot.content
    assert (second.snapshot.path, named.snapshot.path) == (None, path)
    assert pickle.loads(pickle.dumps(named)).snapshot == named.snapshot


def test_a_base_models_sample_has_no_step(service: tinkex.ServiceClient) -> None:
    made_by = _sample(service.create_sampling_client(base_model="toy").result()).snapshot
    assert made_by is not None
    assert (made_by.step, made_by.content, made_by.path) == (None, None, None)


def test_a_stream_says_it_too(service: tinkex.ServiceClient) -> None:
    training = _training(service)
    client = training.save_weights_and_get_sampling_client().result()
    stream = client.stream(PROMPT, PARAMS)
    assert sum(len(event.tokens) for event in stream) == 4
    assert stream.result.sequences[0].snapshot == _sample(client).snapshot


def test_metrics_show_how_many_steps_ago_the_samples_were_made(
    service: tinkex.ServiceClient,
) -> None:
    training = _training(service)
    old = _sample(training.save_weights_and_get_sampling_client().result())
    assert _step(training, samples=[old, old])["sample_age_steps:max"] == 0
    _step(training)
    new = _sample(training.save_weights_and_get_sampling_client().result())
    metrics = _step(training, samples=[old, new])
    assert metrics["sample_age_steps:max"] == 2
    assert metrics["sample_age_steps:mean"] == 1
    assert "samples_dropped:sum" not in metrics
    assert _step(training, samples=[None, new])["sample_age_unknown:sum"] == 1


def test_too_old_samples_are_refused_or_dropped_as_the_client_asks(
    service: tinkex.ServiceClient,
) -> None:
    training = _training(service)
    old = _sample(training.save_weights_and_get_sampling_client().result())
    _step(training)
    _step(training)
    new = _sample(training.save_weights_and_get_sampling_client().result())
    with pytest.raises(InvalidInputError, match=r"sample 0 is 2 steps old.*drop_stale=True"):
        _step(training, samples=[old, new], max_age_steps=1)
    dropped = _step(training, samples=[old, new], max_age_steps=1, drop_stale=True)
    assert dropped["samples_dropped:sum"] == 1
    assert dropped["sample_age_steps:max"] == 0
    assert dropped["step:max"] == 3, "the refused step was not made"
    with pytest.raises(InvalidInputError, match="none is left"):
        _step(training, samples=[old, old], max_age_steps=0, drop_stale=True)
    with pytest.raises(InvalidInputError, match="nobody knows"):
        _step(training, samples=[None, new], max_age_steps=5)
    with pytest.raises(InvalidInputError, match="needs `samples`"):
        _step(training, max_age_steps=5)
    with pytest.raises(InvalidInputError, match="one for each of the 2 datums"):
        _step(training, samples=[new])


def test_a_run_from_a_checkpoint_counts_on_from_its_step(service: tinkex.ServiceClient) -> None:
    training = _training(service)
    for _ in range(3):
        _step(training)
    state = training.save_state("at-three").result().path
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    sampler = resumed.save_weights_and_get_sampling_client().result()
    seen = _sample(sampler)
    assert seen.snapshot is not None
    assert seen.snapshot.step == 3
    assert _step(resumed, samples=[seen, seen])["sample_age_steps:max"] == 0
    named = resumed.save_weights_for_sampler("later").result().path
    later = _sample(service.create_sampling_client(model_path=named).result())
    assert _step(resumed, samples=[seen, later])["sample_age_steps:mean"] == 0.5


def test_a_new_snapshot_does_not_stop_the_samples_that_run(
    start_server: Callable[..., AbstractContextManager[str]], tmp_path: Path
) -> None:
    """The long sample takes minutes; it is still there when everything else is done."""
    engine = "toy:token_latency_s=0.05"
    with (
        start_server(tmp_path, "--engine", engine) as url,
        tinkex.ServiceClient(base_url=url, api_key="tml-x") as service,
    ):
        training = _training(service)
        first = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=20_000, seed=1, stop=[])
        tokens = iter(first.stream(PROMPT, params))
        begun = next(tokens).tokens
        for _ in range(2):
            _step(training)
            second = training.save_weights_and_get_sampling_client().result()
            assert _sample(second).snapshot != _sample(first).snapshot
            begun += next(tokens).tokens
        again = iter(first.stream(PROMPT, params))
        expected = [token for _ in range(3) for token in next(again).tokens]
        assert begun == expected, "it went on where it was, from the weights it began with"
        tokens.close()  # type: ignore[attr-defined]
        again.close()  # type: ignore[attr-defined]


def test_steps_of_before_a_load_do_not_count_after_it() -> None:
    count = StepCount()
    early = count.asked()
    count.loaded()
    count.told(early, 1.0)
    made_by = types.WeightsSnapshot("s", step=5)
    sequence = types.SampledSequence("stop", tokens=[1]).made_by(made_by)
    assert count.age(sequence) is None
    count.told(count.asked(), 6.0)
    assert count.age(sequence) == 1


def test_without_a_bound_nothing_is_left_out() -> None:
    fresh = keep_fresh([0, 7, None], max_age_steps=None, drop_stale=True)
    assert fresh.kept == [0, 1, 2]
    assert fresh.metrics == {
        "sample_age_steps:mean": 3.5,
        "sample_age_steps:max": 7.0,
        "sample_age_unknown:sum": 1.0,
    }

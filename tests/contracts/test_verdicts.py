"""What an engine would refuse is refused at the door, and nothing else: one table for all.

The same random settings go to the server's checks, to the real engine and to the toy; all three
take them or all three refuse them. What they take, both engines compute: numbers that their floats
do not hold are refused at the door, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.contract.losses import LOSSES
from tinkex.contract.optimizers import OPTIMIZERS, check_params
from tinkex.contract.sampling import DrawSettings, SampleOptions
from tinkex.contract.settings import Setting, settings_of
from tinkex.engine.jobs import LoraSpec, ModelInfo, SampleJob, TrainDatum, TrainJob
from tinkex.engine.lora.adapter import Target, fresh_adapter
from tinkex.engine.numerics.ops import CPU
from tinkex.engine.optim.optimizer import OptimizerState, apply_step
from tinkex.engine.sample.checks import check_sample_job
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.losses import loss_and_slopes
from tinkex.engine.toy.model import ToyAdapter
from tinkex.engine.toy.sampler import ToySampler
from tinkex.engine.train.data import Limits, loss_of, read_datum
from tinkex.engine.train.tasks import check_job
from tinkex.errors import InvalidInputError
from tinkex.server.jobs import validation
from tinkex.server.jobs.decode import TrainRequest
from tinkex.types import OptimStepRequest, SampleRequest
from tinkex.wire import json_codec

many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
EDGES = st.sampled_from(
    [-1, -1e-9, 0, 0.0, -0.0, 5e-324, 1e-46, 1e-30, 0.5, 1 - 1e-16, 1, 1.0, 1 + 1e-9, 2, 1e3]
    + [1e6, 1e7, 1e30, 1e31, 1e39, 1.7e308, 10**25, 10**400]
)
ODD = st.sampled_from([float("nan"), float("inf"), -float("inf"), True, "1", "", [], {}, 2**70])
LINEAR = Target.of(2, "mlp", "a", b=3)
LIMITS = Limits(vocab_size=50, max_length=64)
VALUES = EDGES | ODD | st.floats() | st.integers(-3, 5)


def some_of(known: tuple[Setting, ...], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from([setting.name for setting in known] + ["unheard_of"])
    return st.dictionaries(names, values, max_size=3)


def refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except InvalidInputError:
        return True
    return False


# ------------------------------------------------------------------------------------ losses


def datum(loss_fn: str) -> TrainDatum:
    inputs: dict[str, Any] = {each.name: np.full(3, -0.5) for each in LOSSES[loss_fn].needs}
    return TrainDatum(
        tokens=np.array([1, 2, 3]), inputs={"target_tokens": np.array([2, 3, 4]), **inputs}
    )


@pytest.mark.parametrize("loss_fn", LOSSES)
@many
@given(data=st.data())
def test_settings_of_a_loss(loss_fn: str, data: st.DataObject):
    config = data.draw(some_of(LOSSES[loss_fn].settings, VALUES))
    batch = (datum(loss_fn),)
    asked = TrainRequest(data=batch, loss_fn=loss_fn, loss_fn_config=config)
    job = TrainJob(
        job_id="", adapter_id="", data=batch, loss_fn=loss_fn, loss_fn_config=config, backward=True
    )

    def toy() -> None:
        inputs = read_datum(batch[0], loss_of(job), path="", limits=LIMITS).inputs
        with np.errstate(all="ignore"):
            loss_and_slopes(loss_fn, np.full(3, -0.7), inputs, config)

    def real() -> None:
        task = check_job(job, LIMITS)
        logprobs = torch.full((3,), -0.7, requires_grad=True)
        loss, _ = task.evaluate(logprobs, task.data[0].inputs)
        assert torch.autograd.grad(loss, logprobs)[0].dtype == torch.float32

    door = refuses(lambda: validation.check_train(asked, None))
    assert refuses(real) == door
    assert refuses(toy) == door


SHAPES = st.sampled_from([(3,), (3, 1), (3, 2), (2,), (), (3, 1, 1)])


@pytest.mark.parametrize("loss_fn", LOSSES)
@many
@given(data=st.data())
def test_inputs_of_a_loss(loss_fn: str, data: st.DataObject):
    names = [each.name for each in LOSSES[loss_fn].inputs] + ["unheard_of"]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True))
    shape = data.draw(SHAPES)
    inputs: dict[str, Any] = {
        name: np.ones(data.draw(st.just(shape) | SHAPES), np.float32) for name in chosen
    }
    whole = data.draw(st.sampled_from([np.int64, np.float32]))
    inputs["target_tokens"] = np.ones(shape, whole)
    batch = (TrainDatum(tokens=np.array([1, 2, 3]), inputs=inputs),)
    asked = TrainRequest(data=batch, loss_fn=loss_fn, loss_fn_config={})
    job = TrainJob(job_id="", adapter_id="", data=batch, loss_fn=loss_fn)
    door = refuses(lambda: validation.check_train(asked, None))
    assert refuses(lambda: check_job(job, LIMITS)) == door
    assert refuses(lambda: read_datum(batch[0], loss_of(job), path="", limits=LIMITS)) == door


# -------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@many
@given(data=st.data())
def test_parameters_of_an_optimizer(optimizer: str, data: st.DataObject):
    """A name that nobody knows cannot reach an engine, whose parameters are a class."""
    known = settings_of(OPTIMIZERS[optimizer])
    given = {"learning_rate": 1e-3} | data.draw(some_of(known, VALUES))
    body = {"model_id": "m", "optimizer_params": {"type": optimizer, **given}}
    if optimizer == "adamw" and data.draw(st.booleans()):
        body = {"model_id": "m", "adam_params": given}
    door = refuses(
        lambda: validation.optimizer_params(json_codec.read(OptimStepRequest, body), optimizer)
    )
    if "unheard_of" in given:
        assert door
        return
    params = OPTIMIZERS[optimizer](**given)

    def toy() -> None:
        with np.errstate(all="ignore"):
            ToyAdapter("toy", 50, LoraSpec(rank=1), optimizer).optim_step(params)

    def real() -> None:
        adapter = fresh_adapter(
            {"one": LINEAR}, rank=1, alpha=1, kinds=("mlp",), seed=0, device="cpu"
        )
        state = OptimizerState.fresh(optimizer, adapter)
        for grad in (torch.full_like(adapter.flat, 1e-3), torch.zeros_like(adapter.flat)):
            apply_step(adapter, state, grad, params, CPU)
        assert torch.isfinite(adapter.flat).all()

    assert refuses(lambda: check_params(optimizer, params)) == door
    assert refuses(real) == door
    assert refuses(toy) == door


# ---------------------------------------------------------------------------------- samples

INFO = ModelInfo(
    base_model="toy",
    arch="toy",
    vocab_size=50,
    max_context_length=64,
    tokenizer_id="",
    eos_token_ids=(2,),
)
BIASES = st.dictionaries(st.integers(-1, 60) | st.just("3"), VALUES, max_size=2)
NAMES = [s.name for s in (*settings_of(DrawSettings), *settings_of(SampleOptions))]


@many
@given(given=st.dictionaries(st.sampled_from(NAMES), VALUES | BIASES, max_size=3))
def test_parameters_of_a_sample(given: dict[str, Any]):
    # The context, the prompt's length and prompt_logprobs are other checks than ranges.
    given = {k: v for k, v in given.items() if k not in ("max_tokens", "prompt_logprobs_last_n")}
    draw = {s.name: given[s.name] for s in settings_of(DrawSettings) if s.name in given}
    options = {s.name: given[s.name] for s in settings_of(SampleOptions) if s.name in given}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"prompt": prompt, "sampling_params": {"max_tokens": 1, **draw}, **options}
    door = refuses(
        lambda: validation.sample_job(
            json_codec.read(SampleRequest, body), base_model="toy", folder=None, info=INFO
        )
    )
    job = SampleJob(
        job_id="",
        base_model="toy",
        adapter_folder=None,
        prompt=np.array([1, 2, 3]),
        max_tokens=1,
        **given,
    )
    assert refuses(lambda: check_sample_job(job, 50)) == door


def test_the_toy_checks_a_sample_as_the_real_engine_does():
    weights = ToyAdapter("toy", 50, LoraSpec(rank=1), "adamw")
    sampler = ToySampler(ToyConfig(vocab_size=50))
    wrong = SampleJob(
        job_id="", base_model="toy", adapter_folder=None, prompt=np.array([1]), min_p=2.0
    )
    with pytest.raises(InvalidInputError, match="min_p: must be at least 0 and at most 1"):
        sampler.add(wrong, weights, print)

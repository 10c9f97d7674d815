"""A training request gets one verdict and one meaning, whichever way it comes.

The same random batch goes to the SDK's checks, over both generations of the wire, and as bare JSON
to the server; then to the engine. The SDK refuses nothing that the server takes, both encodings are
judged as the JSON is and mean the same arrays, and the engine takes what the door has taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.client import validation as client_checks
from tinkex.contract.losses import LOSSES
from tinkex.engine.jobs import ModelInfo, TrainJob
from tinkex.engine.numerics.arrays import dense
from tinkex.engine.train.data import Limits
from tinkex.engine.train.tasks import check_job
from tinkex.errors import InvalidInputError
from tinkex.server.jobs import validation
from tinkex.server.jobs.decode import TrainRequest, train_request
from tinkex.types import Datum, ForwardBackwardInput, ForwardBackwardRequest
from tinkex.wire import Generation, requests

INFO = ModelInfo(
    base_model="toy",
    arch="toy",
    vocab_size=50,
    max_context_length=6,
    tokenizer_id="",
    eos_token_ids=(2,),
)
LIMITS = Limits(vocab_size=50, max_length=6)
ODD: list[Any] = [None, True, "1", "", [], {}, 1.5, -0.0, 1e-40, 1e39, 2**31, 2**63, 10**30, -1, 50]
rarely = st.integers(0, 39).map(lambda n: n == 0)


def numbers(dtype: str) -> st.SearchStrategy[Any]:
    usual = st.integers(0, 49) if dtype == "int64" else st.sampled_from([0, 1, -0.0, 0.5, -2.25])
    return st.tuples(rarely, st.sampled_from(ODD), usual).map(lambda x: x[1] if x[0] else x[2])


@st.composite
def tensors(draw: Callable[[Any], Any], length: int, dtype: str, width: int | None) -> Any:
    if draw(rarely):
        return draw(st.sampled_from(ODD))
    length += draw(rarely)
    shape = [length] if width is None else [length, width]
    if draw(rarely):
        shape = draw(st.sampled_from([[], [0], [1, *shape], [-1], [2**40], [True], [1] * 33, "x"]))
    size = length * (1 if width is None else width)
    cells = st.lists(numbers(dtype), min_size=size, max_size=size)
    tensor: dict[str, Any] = {"data": draw(cells), "dtype": dtype}
    if width is not None or draw(st.booleans()):
        tensor["shape"] = shape
    if width is not None and draw(st.booleans()):
        kept = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        places = [divmod(i, width) for i, keep in enumerate(kept) if keep]
        if draw(rarely):
            places = places[:1] + places  # a cell twice
        tensor["data"] = tensor["data"][: len(places)]
        tensor["sparse_col_indices"] = [column for _, column in places]
        tensor["sparse_crow_indices"] = [
            sum(row < r for row, _ in places) for r in range(length + 1)
        ]
    return tensor


@st.composite
def datums(draw: Callable[[Any], Any], loss_fn: str) -> Any:
    loss = LOSSES[loss_fn]
    length = draw(st.integers(0, 7))
    width = draw(st.none() | st.integers(0, 2)) if loss.soft_targets else None
    cut = draw(st.integers(0, length))
    chunks: list[Any] = [
        {"type": "encoded_text", "tokens": draw(st.lists(numbers("int64"), min_size=n, max_size=n))}
        for n in (cut, length - cut)
    ]
    if draw(rarely):
        chunks.append(draw(st.sampled_from([*ODD, {"type": "dmel", "dmel": "aGk="}])))
    given = [each for each in loss.inputs if each not in loss.takes or draw(st.booleans())]
    inputs = {each.name: draw(tensors(length, each.dtype, width)) for each in given}
    if draw(rarely):
        inputs[draw(st.sampled_from(["advantages", "x", "a\x00"]))] = inputs["target_tokens"]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


@st.composite
def batches(draw: Callable[[Any], Any]) -> Any:
    loss_fn = draw(st.sampled_from(sorted(LOSSES)))
    names = [setting.name for setting in LOSSES[loss_fn].settings] + ["unheard_of"]
    values = st.sampled_from([0, 0.5, 1, 1.5, 10**25, *ODD])
    config = draw(st.none() | st.dictionaries(st.sampled_from(names), values, max_size=1))
    return draw(st.lists(datums(loss_fn), max_size=2)), loss_fn, config


def judged(content: bytes, content_type: str) -> TrainRequest:
    opened = requests.open_body("forward_backward", content, content_type)
    asked = train_request(opened.read())
    validation.check_train(asked, INFO)
    return asked


def verdict(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except InvalidInputError as exc:
        return exc


def meaning(asked: TrainRequest) -> Any:
    """The numbers of a batch, whether its tensors came dense or sparse."""
    data = [
        (datum.tokens.tolist(), {k: _filled(k, value) for k, value in datum.inputs.items()})
        for datum in asked.data
    ]
    return data, asked.loss_fn, dict(asked.loss_fn_config)


def _filled(name: str, value: Any) -> tuple[str, Any]:
    array = dense(value, name, -np.inf if name == "logprobs" else 0.0)
    return str(array.dtype), array.tolist()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=batches())
def test_a_batch_has_one_verdict_and_one_meaning(batch: Any):
    data, loss_fn, config = batch
    inner = {"data": data, "loss_fn": loss_fn, "loss_fn_config": config}
    body = {"forward_backward_input": inner, "model_id": "m", "seq_id": 1}
    door = verdict(lambda: judged(json.dumps(body).encode(), "application/json"))

    def sdk() -> ForwardBackwardRequest:
        name = client_checks.check_loss(loss_fn, config)
        made = client_checks.check_data([Datum._validate_object(item) for item in data], name)
        return ForwardBackwardRequest(ForwardBackwardInput(made, name, config), "m", 1)

    asked = verdict(sdk)
    if isinstance(door, InvalidInputError):
        if isinstance(asked, ForwardBackwardRequest):
            for generation in Generation:
                assert isinstance(verdict(lambda g=generation: sent(asked, g)), InvalidInputError)
        return
    assert isinstance(asked, ForwardBackwardRequest), asked
    assert meaning(sent(asked, Generation.V0_36)) == meaning(door)
    old = verdict(lambda: sent(asked, Generation.V0_4))
    if not isinstance(old, InvalidInputError):
        assert meaning(old) == meaning(door)
    else:  # what an older server cannot be told is refused in words, here sparse logprobs
        assert "0.4.1 generation" in str(old)
    job = TrainJob(
        job_id="", adapter_id="", data=door.data, loss_fn=loss_fn,
        loss_fn_config=door.loss_fn_config, backward=True,
    )  # fmt: skip
    check_job(job, LIMITS)


def sent(asked: ForwardBackwardRequest, generation: Generation) -> TrainRequest:
    body = requests.encode("forward_backward", asked, generation)
    return judged(body.content, body.content_type)

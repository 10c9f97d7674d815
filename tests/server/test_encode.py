"""Results that are not finite reach every generation of clients as they are."""

from __future__ import annotations

import json
import math

import numpy as np

from tinkex.engine.jobs import SampledTokens, SampleResult, TrainResult
from tinkex.server.jobs import encode
from tinkex.types import ForwardBackwardOutput, OptimStepResponse
from tinkex.wire import results


def test_a_diverged_gradient_norm_is_a_number_every_client_reads():
    """`null` would fail the official client's validation; the text "NaN" is read as NaN."""
    payload = encode.metrics_json({"grad_norm": math.nan, "lr": 0.5})
    assert payload == b'{"metrics":{"grad_norm":"NaN","lr":0.5}}'
    assert math.isnan(results.decode(OptimStepResponse, payload).metrics["grad_norm"])


def test_a_nan_logprob_survives_the_older_json():
    arrays = ({"logprobs": np.array([-1.0, np.nan], np.float32)},)
    result = TrainResult(outputs=arrays, metrics={"loss:sum": math.nan}, num_tokens=2)
    payload = encode.train_json(encode.train_payload(result))
    assert math.isnan(json.loads(payload)["metrics"]["loss:sum"])
    output = results.decode(ForwardBackwardOutput, payload)
    np.testing.assert_array_equal(output.loss_fn_outputs[0]["logprobs"].array, [-1.0, np.nan])


def test_older_json_of_a_sample_has_ids_and_a_null_for_the_first_prompt_token():
    tokens = np.array([1], np.int32)
    one = SampledTokens(tokens=tokens, logprobs=np.array([-1], np.float32), stop_reason="stop")
    sample = SampleResult(sequences=(one,), prompt_logprobs=np.array([np.nan, -2], np.float32))
    body = json.loads(encode.sample_json(encode.sample_payload(sample), ["x"]))
    assert body["prompt_logprobs"] == [None, -2.0]
    assert body["sequences"][0]["sequence_id"] == "x"

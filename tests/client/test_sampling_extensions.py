"""Sampling parameters of our own reach a server that honours them, and no other."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

import tinkex
from tinkex import types
from tinkex.client.sampling.sample_requests import check_supported, sample_request
from tinkex.client.session.flags import ServerFlags
from tinkex.contract.sampling import EXTENSIONS
from tinkex.errors import NotSupportedError
from tinkex.server.routes.service import CLIENT_CONFIG
from tinkex.wire import requests

GIVEN: dict[str, Any] = {"min_p": 0.1, "logit_bias": {7: -100, 3: 1.5}}
ON_THE_WIRE: dict[str, Any] = {"min_p": 0.1, "logit_bias": {"7": -100.0, "3": 1.5}}


def request(**params: Any) -> types.SampleRequest:
    prompt = tinkex.ModelInput.from_ints([1, 2])
    return sample_request(prompt, 1, tinkex.SamplingParams(**params))


def sent_params(sample: types.SampleRequest) -> dict[str, Any]:
    return orjson.loads(requests.encode("asample", sample).content)["sampling_params"]


def test_every_extension_is_tried_here():
    assert set(GIVEN) == set(EXTENSIONS)


@pytest.mark.parametrize("name", GIVEN)
def test_a_server_that_does_not_announce_it_never_sees_it(name):
    with pytest.raises(NotSupportedError, match=f"sampling_params.{name}: this server does not"):
        check_supported(request(**{name: GIVEN[name]}), ServerFlags(tinkex_sampling_params="other"))
    check_supported(request(), ServerFlags())


@pytest.mark.parametrize("name", GIVEN)
def test_it_travels_when_it_is_given_and_only_then(name):
    given = request(**{name: GIVEN[name]})
    check_supported(given, ServerFlags.from_json(CLIENT_CONFIG))
    assert sent_params(given)[name] == ON_THE_WIRE[name]
    assert name not in sent_params(request())

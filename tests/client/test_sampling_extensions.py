"""Sampling parameters of our own reach a server that honours them, and no other."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

import tinkex
from tinkex.client.sampling.sample_fields import SampleFields
from tinkex.client.session.flags import ServerFlags
from tinkex.contract.sampling import EXTENSIONS
from tinkex.errors import NotSupportedError
from tinkex.server.routes.service import CLIENT_CONFIG

GIVEN: dict[str, Any] = {"min_p": 0.1, "logit_bias": {7: -100, 3: 1.5}}
ON_THE_WIRE: dict[str, Any] = {"min_p": 0.1, "logit_bias": {"7": -100.0, "3": 1.5}}


def fields(**params: Any) -> SampleFields:
    prompt = tinkex.ModelInput.from_ints([1, 2])
    made = SampleFields(
        prompt=prompt, num_samples=1, sampling_params=tinkex.SamplingParams(**params)
    )
    made.check()
    return made


def test_every_extension_is_tried_here():
    assert set(GIVEN) == set(EXTENSIONS)


@pytest.mark.parametrize("name", GIVEN)
def test_a_server_that_does_not_announce_it_never_sees_it(name):
    with pytest.raises(NotSupportedError, match=f"sampling_params.{name}: this server does not"):
        fields(**{name: GIVEN[name]}).check_honoured(ServerFlags(tinkex_sampling_params="other"))
    fields().check_honoured(ServerFlags())


@pytest.mark.parametrize("name", GIVEN)
def test_it_travels_when_it_is_given_and_only_then(name):
    given = fields(**{name: GIVEN[name]})
    given.check_honoured(ServerFlags.from_json(CLIENT_CONFIG))
    body = orjson.loads(given.body("session", 1))
    assert body["sampling_params"][name] == ON_THE_WIRE[name]
    assert name not in orjson.loads(fields().body("session", 1))["sampling_params"]

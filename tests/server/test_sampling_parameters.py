"""min_p and logit_bias do on the server what they say, and are refused where they make no sense."""

from __future__ import annotations

from typing import Any

import pytest
from app_world import AppWorld

from tinkex.wire import tinker_public_pb2 as pb


async def sampler(world: AppWorld) -> str:
    session = await world.session()
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    made = await world.ok("create_sampling_session", asked)
    return str(made["sampling_session_id"])


def body(session: str, **params: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": session,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": [], "seed": 1, **params},
    }


async def tokens(world: AppWorld, **params: Any) -> list[list[int]]:
    asked = body(await sampler(world), **params)
    result = await world.result(await world.ok("asample", asked))
    sequences = pb.SampleResponse.FromString(result).sequences
    return [list(memoryview(s.tokens).cast("i")) for s in sequences]


async def test_a_large_bias_decides_every_token(app_world: AppWorld) -> None:
    for temperature in (0.0, 1.0):
        drawn = await tokens(app_world, temperature=temperature, logit_bias={"17": 100})
        assert drawn == [[17] * 4] * 2


async def test_min_p_one_leaves_only_the_likeliest(app_world: AppWorld) -> None:
    assert await tokens(app_world, min_p=1.0) == await tokens(app_world, temperature=0.0)


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"min_p": 1.5}, "sampling_params.min_p"),
        ({"logit_bias": {"x": 1}}, "sampling_params.logit_bias"),
        ({"logit_bias": {"1": 101}}, "sampling_params.logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "sampling_params.logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "sampling_params.logit_bias"),
        ({"repetition_penalty": 1.2}, "sampling_params.repetition_penalty"),
    ],
)
async def test_what_no_engine_can_do_is_refused_at_the_door(
    app_world: AppWorld, params: dict[str, Any], path: str
) -> None:
    await app_world.facts()
    answer = await app_world.post("asample", body(await sampler(app_world), **params))
    assert answer.status_code == 400
    assert answer.json()["path"] == path


async def test_a_parameter_of_a_newer_client_that_says_nothing_is_taken(
    app_world: AppWorld,
) -> None:
    assert await tokens(app_world, repetition_penalty=None) == await tokens(app_world)

"""Answers that the server sampled are kept for who agreed, for a while, and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from visits import token_of, visitor

from tinkex.engine.jobs import SampledTokens, SampleResult, TrainDatum
from tinkex.server.console.rollout_view import MAX_COLORED, rollout_view
from tinkex.server.runs.rollouts import MAX_SHOWN_TOKENS, Rollouts

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def world(start_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server that may keep answers, and a run of ann's."""
    import tinkex

    folder: Path = tmp_path_factory.mktemp("rollouts")
    keys = ("--api-key", "tml-ann=ann", "--api-key", "tml-ben=ben")
    with start_server(folder, "--engine", "toy", "--keep-rollouts", *keys) as base_url:
        with tinkex.ServiceClient(base_url=base_url, api_key="tml-ann") as service:
            training = service.create_lora_training_client(base_model="toy", rank=4)
            yield SimpleNamespace(base_url=base_url, training=training, run_id=training.model_id)


def sample(training):
    """Four answers from the weights as they are now."""
    import tinkex

    sampler = training.save_weights_and_get_sampling_client()
    params = tinkex.SamplingParams(max_tokens=6, seed=1)
    return sampler.sample(tinkex.ModelInput.from_ints(PROMPT), 4, params).result().sequences


def learn(training, sequence, advantage: float) -> None:
    """One RL step on one answer."""
    import tinkex

    tokens = PROMPT + list(sequence.tokens)
    before = [0.0] * (len(PROMPT) - 1)
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + list(sequence.logprobs),
            "advantages": before + [advantage] * len(sequence.tokens),
        },
    )
    training.forward_backward([datum], "importance_sampling").result()
    training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result()


def rollouts(client: httpx.Client, run_id: str) -> dict:
    return client.get(f"/console/api/runs/{run_id}/rollouts").json()


def agree(client: httpx.Client, run_id: str, **form: str) -> httpx.Response:
    token = token_of(client.get(f"/console/runs/{run_id}/rollouts").text)
    return client.post("/console/agreement", data={"run": run_id, "form_token": token, **form})


def test_answers_are_kept_from_the_agreement_to_its_end(world):
    with visitor(world, "tml-ann") as ann:
        sample(world.training)
        assert rollouts(ann, world.run_id)["answers"] == []
        assert "Stop and discard" in agree(ann, world.run_id, keep="true").text
        said = sample(world.training)
        told = rollouts(ann, world.run_id)
        assert [one["tokens"] for one in told["answers"]] == [list(one.tokens) for one in said]
        assert {one["group"] for one in told["answers"]} == {0}
        learn(world.training, said[0], 0.75)
        judged = rollouts(ann, world.run_id)["answers"]
        assert judged[0]["advantages"] == pytest.approx([0.75] * len(said[0].tokens))
        sample(world.training)
        assert rollouts(ann, world.run_id)["steps"] == [0, 1]
        page = ann.get(f"/console/runs/{world.run_id}/rollouts?step=0&color=advantage").text
        assert '<span class="up3"' in page

        with visitor(world, "tml-ben") as ben:
            for path in ("", "/api"):
                address = f"/console{path}/runs/{world.run_id}/rollouts"
                assert ben.get(address).status_code == 404
            form = {"run": world.run_id, "form_token": token_of(ben.get("/console").text)}
            assert ben.post("/console/agreement", data=form).status_code == 404
        assert rollouts(ann, world.run_id)["answers"] != []

        agree(ann, world.run_id)
        assert rollouts(ann, world.run_id)["answers"] == []
        sample(world.training)
        assert rollouts(ann, world.run_id)["answers"] == []


def test_the_agreement_needs_a_form_of_this_page(world):
    with visitor(world, "tml-ann") as ann:
        form = {"run": world.run_id, "keep": "true"}
        assert ann.post("/console/agreement", data=form).status_code == 403


def said(*texts: list[int]) -> SampleResult:
    return SampleResult(
        sequences=tuple(
            SampledTokens(
                tokens=np.array(text, np.int32),
                logprobs=np.zeros(len(text), np.float32),
                stop_reason="stop",
            )
            for text in texts
        )
    )


def kept(rollouts: Rollouts, user: str, *texts: list[int], run: str = "run", step: int = 0) -> None:
    prompt = np.array(PROMPT, np.int64)
    rollouts.sampled(user, run, step, prompt, said(*texts), base_model="toy", snapshot="s")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_answers_go_when_their_time_is_over():
    clock = Clock()
    rollouts = Rollouts(is_on=True, ttl_s=60, max_bytes=10**6, clock=clock)
    rollouts.agree("ann", True)
    kept(rollouts, "ann", [1], step=1)
    clock.now += 50
    kept(rollouts, "ann", [2], step=2)
    clock.now += 20
    rollouts.forget()
    assert rollouts.steps("run") == [2]
    clock.now += 60
    rollouts.forget()
    assert (rollouts.steps("run"), rollouts.kept_bytes) == ([], 0)


def test_who_keeps_most_makes_room():
    rollouts = Rollouts(is_on=True, ttl_s=60, max_bytes=20_000)
    for user in ("ann", "ben"):
        rollouts.agree(user, True)
    kept(rollouts, "ben", [9], run="small")
    for number in range(1000):
        kept(rollouts, "ann", [number, 1, 2], run="large", step=number)
    assert rollouts.kept_bytes <= 20_000
    assert rollouts.steps("small") == [0]
    assert max(rollouts.steps("large")) == 999


def test_answers_of_a_step_are_handed_out_up_to_so_many_tokens():
    """A page of all that is kept once took a thousand megabytes to make."""
    rollouts = Rollouts(is_on=True, ttl_s=60, max_bytes=10**8)
    rollouts.agree("ann", True)
    kept(rollouts, "ann", *([[1] * 10_000] * 40))
    found = rollouts.at("run", 0)
    assert 0 < sum(len(one.tokens) for one in found) <= MAX_SHOWN_TOKENS
    kept(rollouts, "ann", [1] * (2 * MAX_SHOWN_TOKENS), step=1)
    assert len(rollouts.at("run", 1)) == 1, "a single one is shown, however long"


def test_a_page_colours_so_many_tokens_and_says_so():
    one = {"group": 0, "tokens": [1] * 1000, "pieces": ["a"] * 1000, "text": "a" * 1000}
    view = rollout_view([{**one, "advantage": at - 50.0} for at in range(100)], "advantage")
    spans = [len(told["spans"]) for group in view["groups"] for told in group["answers"]]
    assert len(spans) == 100
    assert sum(spans) <= MAX_COLORED + 100
    assert view["num_plain"] == spans.count(1)


def test_a_server_without_the_setting_keeps_nothing():
    rollouts = Rollouts(is_on=False, ttl_s=60, max_bytes=10**6)
    rollouts.agree("ann", True)
    kept(rollouts, "ann", [1])
    assert (rollouts.agreement("ann"), rollouts.steps("run")) == (None, [])


async def test_advantages_reach_every_equal_answer_of_that_run_alone():
    rollouts = Rollouts(is_on=True, ttl_s=60, max_bytes=10**6)
    rollouts.agree("ann", True)
    kept(rollouts, "ann", [1, 2], [1, 2], [3, 4])
    kept(rollouts, "ann", [1, 2], run="other")
    tokens = np.array([*PROMPT, 1, 2])
    inputs = {"target_tokens": tokens[1:], "advantages": np.array([0.0, 0.0, 0.5, -0.5])}
    await rollouts.trained("ann", "run", [TrainDatum(tokens=tokens[:-1], inputs=inputs)])
    first, second, third = rollouts.at("run", 0)
    assert first.advantages.tolist() == second.advantages.tolist() == [0.5, -0.5]
    assert third.advantages is None
    assert rollouts.at("other", 0)[0].advantages is None


def test_a_run_that_goes_takes_its_answers_along():
    rollouts = Rollouts(is_on=True, ttl_s=60, max_bytes=10**6)
    rollouts.agree("ann", True)
    kept(rollouts, "ann", [1], [2], run="gone")
    kept(rollouts, "ann", [3], run="stays")
    rollouts.drop_run("gone")
    assert (rollouts.steps("gone"), rollouts.steps("stays")) == ([], [0])

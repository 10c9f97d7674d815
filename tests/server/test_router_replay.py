"""Experts of a sample through the whole server: told, carried by a datum, replayed, refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_world import AppWorld
from datums import datum
from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine" / "families"))
from table import make

from tinkex import ServiceClient, types
from tinkex.errors import BadRequestError, NotSupportedError, TinkerError

PROMPT = [(3 + i * 5) % 61 for i in range(20)]
ADAM = types.AdamParams(learning_rate=0.05)


def of_sample(
    response: types.SampleResponse, sequence: types.SampledSequence, experts: Any
) -> types.Datum:
    tokens = PROMPT + sequence.tokens
    before = [0.0] * (len(PROMPT) - 1)
    inputs: dict[str, Any] = {
        "logprobs": before + (sequence.logprobs or []),
        "advantages": before + [1.0] * len(sequence.tokens),
    }
    if experts is not None:
        inputs["routed_experts"] = experts
    return datum(tokens, **inputs)


def experts_of(response: types.SampleResponse, sequence: types.SampledSequence) -> Any:
    """As in the docs: join, and leave out the last row with the last token."""
    assert response.prompt_routed_experts is not None
    assert sequence.routed_experts is not None
    rows = [response.prompt_routed_experts.array, sequence.routed_experts.array]
    return np.concatenate(rows)[:-1]


@pytest.mark.timeout(1200)
def test_training_replays_what_the_sampler_routed(tmp_path: Path) -> None:
    mixture, dense = tmp_path / "mixture", tmp_path / "dense"
    make("qwen3_moe", mixture)
    make("qwen3-yarn", dense)
    options = ["--engine", "torch", "--device", "cpu"]
    options += ["--model", str(mixture), "--model", str(dense)]
    with ServerProcess(tmp_path / "server", *options) as server:
        with ServiceClient(base_url=server.base_url, api_key="tml-x") as service:
            training = service.create_lora_training_client(str(mixture), rank=8, seed=1)
            sampler = training.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
            future = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, params)
            assert future.result().prompt_routed_experts is None
            asked = sampler.sample(
                types.ModelInput.from_ints(PROMPT), 3, params, routed_experts=True
            )
            response = asked.result()
            first = response.sequences[0]
            rows = [experts_of(response, sequence) for sequence in response.sequences]
            assert rows[0].shape == (len(PROMPT) + 12 - 1, 2, 1)  # two of three layers have experts
            assert (first.routed_experts.array[-1] == -1).all()

            def score(with_experts: bool, client: Any = training) -> Any:
                data = [
                    of_sample(response, sequence, experts if with_experts else None)
                    for sequence, experts in zip(response.sequences, rows, strict=True)
                ]
                return client.forward(data, "importance_sampling").result()

            assert score(True).metrics["sampler_gap_max:max"] < 1e-5
            data = [
                of_sample(response, s, r) for s, r in zip(response.sequences, rows, strict=True)
            ]
            done = training.forward_backward(data, "importance_sampling")
            training.optim_step(ADAM).result()
            assert done.result().metrics["sampler_gap_max:max"] < 1e-5
            # The policy has moved: by itself it would now take other experts for some tokens.
            free, replayed = (
                np.concatenate([o["logprobs"].array for o in score(flag).loss_fn_outputs])
                for flag in (False, True)
            )
            assert not np.allclose(free, replayed, atol=1e-4)
            refuse_what_cannot_be(training, response, first, rows[0])
            other = service.create_sampling_client(base_model=str(dense))
            with pytest.raises(TinkerError, match="has no experts"):
                other.sample(
                    types.ModelInput.from_ints(PROMPT), 1, params, routed_experts=True
                ).result()
            plain = service.create_lora_training_client(str(dense), rank=4)
            with pytest.raises(BadRequestError, match="has no experts"):
                score(True, plain)


def refuse_what_cannot_be(training: Any, response: Any, sequence: Any, rows: Any) -> None:
    with pytest.raises(TinkerError, match="30 rows for 31 tokens"):
        training.forward([of_sample(response, sequence, rows[:-1])], "importance_sampling")
    wide = np.concatenate([rows, rows], axis=2)
    with pytest.raises(BadRequestError, match=r"must be int64 of shape \[31, 2, 1\]"):
        training.forward([of_sample(response, sequence, wide)], "importance_sampling").result()
    outside = rows.copy()
    outside.view(np.int16)[3, 1, 0] = 99
    with pytest.raises(BadRequestError, match="token 3, layer 1 .*they are 0..5"):
        training.forward([of_sample(response, sequence, outside)], "importance_sampling").result()
    partly = rows.copy()
    partly[:10] = -1  # not recorded: the router chooses there, and the result is a result
    training.forward([of_sample(response, sequence, partly)], "importance_sampling").result()


async def test_the_toy_refuses_to_tell_experts(app_world: AppWorld) -> None:
    session = await app_world.session()
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    made = await app_world.ok("create_sampling_session", asked)
    body = {
        "sampling_session_id": made["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
        "routed_experts": True,
    }
    answer = await app_world.post("asample", body)
    assert answer.status_code == 400
    assert "toy has no experts" in answer.text


def test_a_server_that_announces_nothing_is_not_asked() -> None:
    from tinkex.client.sampling.sample_requests import check_supported, sample_request
    from tinkex.client.session.flags import ServerFlags
    from tinkex.client.validation import check_routed_experts

    prompt = types.ModelInput.from_ints([1, 2])
    request = sample_request(prompt, 1, types.SamplingParams(), routed_experts=True)
    with pytest.raises(NotSupportedError, match="routed_experts"):
        check_supported(request, ServerFlags())
    check_supported(request, ServerFlags(tinkex_routed_experts=True))
    carried = types.Datum(prompt, {"routed_experts": np.zeros((2, 1, 1), np.int64)})
    with pytest.raises(NotSupportedError, match=r"data\[0\].loss_fn_inputs.routed_experts"):
        check_routed_experts([carried], honoured=False)


def test_experts_survive_both_encodings_and_the_ids_of_a_promise() -> None:
    from tinkex.wire import results
    from tinkex.wire.generation import PROTOBUF

    tensor = types.TensorData.from_numpy(np.arange(6, dtype=np.int64).reshape(3, 2, 1) - 1)
    sequence = types.SampledSequence("stop", tokens=[1], logprobs=[-1.0], routed_experts=tensor)
    whole = types.SampleResponse([sequence], prompt_routed_experts=tensor)
    for content_type in (PROTOBUF, None):
        sent = results.encode(whole, content_type) if content_type else results.encode(whole)
        read = results.decode(types.SampleResponse, sent.content, sent.content_type)
        assert read == whole
    named = results.with_sequence_ids(whole, ["a"])
    assert named.sequences[0].routed_experts == tensor
    assert named.prompt_routed_experts == tensor
    assert types.SampleResponse([sequence]) != whole


def test_a_result_with_experts_is_bounded_before_it_is_computed() -> None:
    from tinkex.contract.routing import ExpertCounts
    from tinkex.engine.jobs import ModelInfo, SampleJob
    from tinkex.errors import InvalidInputError
    from tinkex.server.jobs.validation import check_result_size

    info = ModelInfo(
        base_model="m", arch="qwen3_moe", vocab_size=100, max_context_length=4096,
        tokenizer_id="m", eos_token_ids=(), experts=ExpertCounts(count=128, per_token=8, layers=48),
    )  # fmt: skip
    job = SampleJob(
        job_id="", base_model="m", adapter_folder=None, prompt=np.zeros(1000, np.int64),
        num_samples=64, max_tokens=1000, routed_experts=True,
    )  # fmt: skip
    with pytest.raises(InvalidInputError, match="768 bytes of routed_experts a token"):
        check_result_size(job, info, 50_000_000)
    check_result_size(job, info, 51_000_000)

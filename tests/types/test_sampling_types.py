"""What sampling takes and gives, and the enums that are also strings (R4)."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from tinkex import types
from tinkex.contract.losses import CUSTOM, LOSSES, UNDEFINED
from tinkex.errors import InvalidInputError
from tinkex.types import (
    LossFnType,
    QueueState,
    RequestErrorCategory,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    Severity,
    StopReason,
    TopkLogprobs,
    is_retryable,
)
from tinkex.types.account.checkpoints import TinkerPath, check_name


def test_lists_are_made_from_the_arrays():
    sequence = SampledSequence("stop", "id", np.array([1, 2], np.int32), np.array([-1, -2.5]))
    assert sequence.tokens == [1, 2]
    assert sequence.logprobs == [-1.0, -2.5]
    assert sequence.topk_logprobs is None


def test_the_older_way_of_making_a_sequence_works():
    """SDK 0.4.1 has `tokens` and `logprobs`, and no ids."""
    sequence = SampledSequence(stop_reason="length", tokens=[1], logprobs=[-0.5])
    assert sequence.sequence_id == ""
    assert sequence.tokens_np.dtype == np.int32


def test_a_prompt_logprob_that_is_missing_reads_as_none():
    response = SampleResponse([], prompt_logprobs=[None, -1.0])
    assert response.prompt_logprobs == [None, -1.0]
    assert np.isnan(response.prompt_logprobs_np[0])


def test_topk_lists_cut_their_empty_cells():
    topk = TopkLogprobs.from_list([None, [(5, -1.0)], [(0, -0.5), (7, -2.0)]])
    assert topk.token_ids.shape == (3, 2)
    assert topk.tolist() == [None, [(5, -1.0)], [(0, -0.5), (7, -2.0)]]
    assert TopkLogprobs(np.zeros((0, 3)), np.zeros((0, 3))).tolist() == []
    with pytest.raises(InvalidInputError, match="2-D"):
        TopkLogprobs([1], [1])
    with pytest.raises(InvalidInputError, match="pairs"):
        TopkLogprobs.from_list([[1]])


def test_responses_compare_by_value_and_pickle():
    response = SampleResponse([SampledSequence("stop", "a", [1], [-1.0])], [np.nan, -1.0])
    assert pickle.loads(pickle.dumps(response)) == response


def test_stop_reasons_are_strings_and_know_a_length():
    assert [reason.value for reason in StopReason] == [
        "length",
        "stop",
        "max_tokens",
        "stop_sequence",
        "eos",
    ]
    assert StopReason.LENGTH == "length"
    assert json.dumps({"r": StopReason.STOP}) == '{"r": "stop"}'
    assert StopReason("max_tokens").is_length
    assert StopReason("LENGTH") is StopReason.LENGTH
    assert not StopReason.EOS.is_length


def test_a_stop_reason_of_a_newer_server_is_kept():
    sequence = SampledSequence("filtered", "a", [1])
    assert sequence.stop_reason == "filtered"
    assert isinstance(sequence.stop_reason, StopReason)
    assert not sequence.stop_reason.is_length
    assert (repr(sequence), sequence.to_dict()["stop_reason"]) == (repr(sequence), "filtered")
    assert pickle.loads(pickle.dumps(sequence)) == sequence
    assert "filtered" not in list(StopReason)
    for wrong in ("", None, 3, "x" * 101):
        with pytest.raises(InvalidInputError, match="expected a short text"):
            SampledSequence(wrong, "a", [1])


def test_enums_are_lenient_in_and_strict_out():
    assert RequestErrorCategory("User") is RequestErrorCategory.User
    assert RequestErrorCategory("something else") is RequestErrorCategory.Unknown
    assert RequestErrorCategory.User.value == "user"
    assert QueueState("Paused_Capacity") is QueueState.PAUSED_CAPACITY
    assert QueueState("new words") is QueueState.UNKNOWN
    assert Severity("warning") is Severity.WARNING
    assert types.EventType("generic_event") is types.EventType.GENERIC_EVENT
    assert LossFnType.CROSS_ENTROPY == "cross_entropy"
    assert LossFnType("kl_divergence") is LossFnType.KL_DIVERGENCE
    with pytest.raises(ValueError, match="nonsense"):
        LossFnType("nonsense")


def test_every_loss_that_is_declared_or_refused_by_name_has_its_member():
    assert set(LossFnType) == {*LOSSES, *UNDEFINED, CUSTOM}


@pytest.mark.parametrize("status", [None, 400, 404, 408, 409, 422, 429, 500, 503])
@pytest.mark.parametrize("category", ["user", "server", "unknown", "User", "odd"])
def test_what_may_be_tried_again(category, status):
    """R4, the truth table: 408, 409 and 429 always; no status and 5xx unless the user erred."""
    may_pass = status is None or status >= 500
    expected = status in (408, 409, 429) or (category.lower() != "user" and may_pass)
    assert is_retryable(category, status) is expected


def test_a_misspelt_sampling_parameter_is_refused_not_ignored():
    with pytest.raises(InvalidInputError, match="^max_token: SamplingParams has no such field"):
        SamplingParams(max_token=5)
    with pytest.raises(InvalidInputError, match="^temperature: must be a finite number, got nan"):
        SamplingParams(temperature=float("nan"))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: types.AdamParams(lr=1), "lr: AdamParams has no such field; it has learning_rate"),
        (lambda: types.AdamParams(learning_rate="fast"), "must be a number, got 'fast'"),
        (lambda: SamplingParams(stop=5), "stop: must be a string or a list, got 5"),
        (lambda: SamplingParams(seed=1.5), "seed: must be an integer, got 1.5"),
        (lambda: types.SampleRequest(prompt=3), "prompt: expected a ModelInput"),
        (lambda: types.SampleRequest(), "prompt: SampleRequest needs it"),
        (
            lambda: types.SaveWeightsRequest(model_id="m", path="p", user_metadata={"a": 1}),
            "user_metadata: 'a' must be text, got int",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_value_in_one_line(make, says):
    """R29: what is wrong, where, and the value; no page of pydantic's."""
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.path


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ({"input_ids": [1], "attention_mask": [1]}, r"Take its \['input_ids'\]"),
        (np.array([[1, 2]]), r"Take its first row"),
    ],
)
def test_what_a_tokenizer_returns_by_default_is_told_apart_from_tokens(tokens, says):
    with pytest.raises(InvalidInputError, match=says):
        types.ModelInput.from_ints(tokens)


def test_the_missing_first_logprob_of_a_prompt_is_explained():
    with pytest.raises(InvalidInputError, match=r"logprobs\[0\].*None.*leave it out with \[1:\]"):
        types.Datum(types.ModelInput.from_ints([1, 2]), {"logprobs": [None, -1.0]})
    with pytest.raises(
        InvalidInputError, match="weigths: no named loss has .* target_tokens, weights"
    ):
        types.Datum(types.ModelInput.from_ints([1, 2]), {"weigths": [1.0, 1.0]})


def test_prompt_logprobs_has_three_states():
    """R2: given True, given False, given None and not given are told apart."""
    base = {
        "prompt": types.ModelInput.from_ints([1]),
        "sampling_params": SamplingParams(),
    }
    for value in (True, False, None):
        request = types.SampleRequest(**base, prompt_logprobs=value)
        assert request.prompt_logprobs is value
        assert "prompt_logprobs" in request.model_fields_set
    assert "prompt_logprobs" not in types.SampleRequest(**base).model_fields_set


def test_optimizer_parameters_are_accepted_under_three_names():
    adam = types.AdamParams(learning_rate=1e-5)
    for name in ("optim_params", "adam_params", "optimizer_params"):
        request = types.OptimStepRequest(**{name: adam}, model_id="m")
        assert request.optim_params == adam
        assert request.adam_params == adam
    with pytest.raises(InvalidInputError, match="exactly one"):
        types.OptimStepRequest(model_id="m")
    with pytest.raises(InvalidInputError, match="exactly one"):
        types.OptimStepRequest(adam_params=adam, optim_params=adam, model_id="m")


def test_an_unknown_optimizer_keeps_its_fields():
    request = types.CreateModelRequest(
        session_id="s",
        model_seq_id=0,
        base_model="m",
        optimizer_config={"type": "unheard_of", "beta": 0.5},
    )
    assert request.model_dump()["optimizer_config"] == {"type": "unheard_of", "beta": 0.5}


@pytest.mark.parametrize(
    "path",
    [
        "tinker://run/weights",
        "tinker://run/other/x",
        "run/weights/x",
        "tinker://run/weights/a/b",
        "tinker:///weights/x",
    ],
)
def test_a_path_that_is_not_a_checkpoint_is_refused(path):
    with pytest.raises(InvalidInputError, match="tinker://RUN"):
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_a_checkpoint_path_has_three_parts():
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path("tinker://s:train:0/weights/x")
    assert parsed.training_run_id == "s:train:0"
    assert parsed.checkpoint_type == "training"
    assert parsed.checkpoint_id == "weights/x"
    saved = types.SaveWeightsResponse(path="tinker://s:train:0/weights/x")
    assert saved.get_console_url().endswith("/checkpoints/s:train:0/weights%2Fx")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".hidden", "a b", "x" * 201, None, 5])
def test_a_name_that_no_server_would_take_is_refused_by_the_one_rule(name):
    with pytest.raises(InvalidInputError, match="^name: checkpoint name .* is not allowed"):
        check_name(name, path="name")


def test_a_path_is_read_and_written_alike():
    text = "tinker://s:train:0/sampler_weights/step=3"
    parsed = TinkerPath.parse(text)
    assert (parsed.run_id, parsed.kind, parsed.name) == ("s:train:0", "sampler_weights", "step=3")
    assert str(parsed) == text
    with pytest.raises(InvalidInputError, match="^path: expected tinker://RUN_ID/weights/NAME"):
        TinkerPath.parse(text, kinds=["weights"], path="path")
    with pytest.raises(InvalidInputError, match="expected tinker://"):
        TinkerPath.parse(None)


def test_an_unchecked_message_is_equal_to_the_checked_one():
    """It sets by hand what pydantic sets, so it is held to all that pydantic makes of it."""
    given = {"prompt": types.ModelInput.from_ints([1]), "sampling_params": SamplingParams()}
    checked = types.SampleRequest(**given, num_samples=2)
    made = types.SampleRequest.unchecked(**given, num_samples=2)
    for one in (made, pickle.loads(pickle.dumps(made)), made.model_copy()):
        assert one == checked
        assert repr(one) == repr(checked)
        assert one.model_fields_set == checked.model_fields_set
        assert list(one.model_dump(mode="json")) == list(checked.model_dump(mode="json"))
    numbered = made.replaced(seq_id=3)
    assert numbered == types.SampleRequest(**given, num_samples=2, seq_id=3)
    assert (made.seq_id, numbered.model_fields_set - made.model_fields_set) == (None, {"seq_id"})
    with pytest.raises(ValueError, match="frozen"):
        made.seq_id = 4

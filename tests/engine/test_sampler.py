"""The sampler generates what the model says, whatever the batch, the cache and the memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from sampler_models import (
    FAMILIES,
    SHAPE,
    VOCAB,
    Model,
    Run,
    detokenize,
    greedy_oracle,
    prompt_of,
    sample,
    trainer_logprobs,
)

from tinkex.engine import jobs
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.lora.adapter import fresh_adapter
from tinkex.engine.model import default_model
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.decoder import Decoder
from tinkex.errors import InvalidInputError


@pytest.fixture(scope="module", params=(False, True), ids=("step by step", "looking ahead"))
def load(request, tmp_path_factory) -> Callable[[str], Model]:
    models: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in models:
            kind, extra = FAMILIES[family]
            torch.manual_seed(0)
            oracle = transformers.AutoModelForCausalLM.from_config(kind(**SHAPE, **extra)).eval()
            folder = tmp_path_factory.mktemp(family)
            oracle.save_pretrained(folder)
            decoder = load_decoder(ModelSource(family, folder))
            models[family] = Model(decoder, oracle, looks_ahead=request.param)
        return models[family]

    return get


@pytest.fixture(scope="module")
def model(load) -> Model:
    model = load("llama")
    for i, name in enumerate(("one", "two")):
        adapter = fresh_adapter(
            model.decoder.targets,
            rank=4 + i,
            alpha=32,
            kinds=("attn", "mlp", "unembed"),
            seed=i,
            device="cpu",
        )
        generator = torch.Generator().manual_seed(i)
        with torch.no_grad():
            for _, _, b_Or in adapter.modules():
                b_Or.normal_(0, 0.02, generator=generator)
        model.adapters[name] = adapter.frozen_copy()
    return model


# ---------------------------------------------------------------------------------------- oracle


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_for_200_tokens(load, family):
    """R31: token for token, from prompts that take several passes to prefill."""
    model = load(family)
    sampler = model.sampler(max_pass_tokens=16)
    run = Run(model, sampler)
    prompts = [prompt_of(23, 1), prompt_of(7, 2)]
    ids = [run.add(p, temperature=0.0, max_tokens=200) for p in prompts]
    for job_id, prompt in zip(ids, prompts, strict=True):
        assert run.tokens(job_id) == [greedy_oracle(model, prompt, 200)]


@pytest.mark.slow
def test_greedy_equals_transformers_on_the_default_model():
    """R31: 200 tokens, token for token, three prompts in one batch."""
    folder = default_model.folder()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = Model(load_decoder(str(folder)), oracle)
    run = Run(model, model.sampler(block_size=16))
    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small town"]
    prompts = [tokenizer(text).input_ids for text in texts]
    ids = [run.add(prompt, temperature=0.0, max_tokens=200) for prompt in prompts]
    for job_id, prompt in zip(ids, prompts, strict=True):
        assert run.tokens(job_id) == [greedy_oracle(model, prompt, 200)]


def test_samples_of_one_prompt_may_end_with_the_token_that_forks_them(model):
    """They never were in a pass of their own."""
    run = Run(model, model.sampler())
    job_id = run.add(prompt_of(9, 1), num_samples=3, max_tokens=1, seed=0)
    run.finish()
    result = run.events[job_id][-1].result
    assert [len(sequence.tokens) for sequence in result.sequences] == [1, 1, 1]
    assert result.device_seconds > 0


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_result_says_when_its_prompt_and_its_tokens_were_computed(model, max_tokens):
    began_at = time.time()
    run = Run(model, model.sampler())
    job_id = run.add(prompt_of(9, 1), num_samples=2, max_tokens=max_tokens, prompt_logprobs=True)
    run.finish()
    turns = run.events[job_id][-1].result.turns
    assert [turn.name for turn in turns] == (["prefill", "decode"] if max_tokens else ["prefill"])
    assert [turn.size for turn in turns] == [9, max_tokens][: len(turns)]
    moments = [began_at, *(moment for turn in turns for moment in turn[1:3]), time.time()]
    assert moments == sorted(moments)


@pytest.mark.parametrize("adapter", [None, "one"])
@pytest.mark.parametrize("memory", ["ample", "tight"])
def test_logprobs_equal_the_trainers_with_chunks_prefix_reuse_and_preemption(
    model, adapter, memory
):
    """The importance ratio of an unchanged policy must be one: 1e-5 in fp32."""
    sampler = model.sampler(max_pass_tokens=8, kv_tokens=4096 if memory == "ample" else 160)
    run = Run(model, sampler)
    shared = prompt_of(21, 9)
    prompts = [shared, shared, shared + prompt_of(5, 3), prompt_of(30, 4), prompt_of(3, 5)]
    ids = [
        run.add(p, adapter=adapter, max_tokens=24, num_samples=2, seed=i, prompt_logprobs=i != 1)
        for i, p in enumerate(prompts)
    ]
    run.finish()
    if memory == "tight":
        assert sampler.scheduler.num_preempted > 0
    assert run.result(ids[1]).prompt_cache_hit_tokens == 20
    for job_id, prompt in zip(ids, prompts, strict=True):
        result = run.result(job_id)
        for sequence in result.sequences:
            expected = trainer_logprobs(model, prompt + sequence.tokens.tolist(), adapter)
            np.testing.assert_allclose(sequence.logprobs, expected[len(prompt) - 1 :], atol=1e-5)
        if result.prompt_logprobs is not None:
            scores = result.prompt_logprobs
            assert np.isnan(scores[0])
            np.testing.assert_allclose(scores[1:], expected[: len(prompt) - 1], atol=1e-5)
    assert sampler.scheduler.pool.num_available == sampler.scheduler.pool.num_blocks


def test_a_tenant_that_gives_way_to_another_still_gets_the_same_tokens(model):
    """The small request starts at once, ends first, and the large one is not changed by it."""
    sampler = model.sampler(max_running=4)
    run = Run(model, sampler)
    long = [run.add(prompt_of(9, n), tenant="ann", max_tokens=40, seed=n) for n in range(6)]
    for _ in range(5):
        sampler.step()
    short = run.add(prompt_of(7, 50), tenant="bob", max_tokens=4, seed=9)
    for _ in range(8):
        sampler.step()
    assert run.tokens(short) == [
        sample(model, prompt_of(7, 50), max_tokens=4, seed=9).sequences[0].tokens.tolist()
    ]
    assert sampler.scheduler.num_preempted > 0
    run.finish()
    for n, job_id in enumerate(long):
        alone = sample(model, prompt_of(9, n), max_tokens=40, seed=n).sequences[0]
        assert run.tokens(job_id) == [alone.tokens.tolist()]


def test_mixed_adapters_in_one_pass_do_not_touch_each_other(model):
    run = Run(model, model.sampler())
    prompt = prompt_of(12)
    names = [None, "one", "two", None, "two", "one"]
    ids = [run.add(prompt, adapter=n, max_tokens=16, seed=3) for n in names]
    alone = {n: sample(model, prompt, adapter=n, max_tokens=16, seed=3) for n in names}
    for job_id, name in zip(ids, names, strict=True):
        expected = alone[name].sequences[0]
        assert run.tokens(job_id) == [expected.tokens.tolist()]
        got = run.result(job_id).sequences[0].logprobs
        np.testing.assert_allclose(got, expected.logprobs, atol=1e-5)
    assert len({tuple(alone[n].sequences[0].logprobs.tolist()) for n in alone}) == 3


def test_each_row_meets_its_own_adapter_though_versions_are_equal(model):
    """Two folders may hold equal content, and so have one version: rows are never told by it."""
    run = Run(model, model.sampler())
    names = ["one", "two", "one", "two"]
    prompts = [prompt_of(length, length) for length in (6, 30, 9, 21)]
    ids = []
    for prompt, name in zip(prompts, names, strict=True):
        ids.append(run.add(prompt, adapter=name, version="v", tenant=name, seed=3, max_tokens=16))
    for job_id, prompt, name in zip(ids, prompts, names, strict=True):
        alone = sample(model, prompt, adapter=name, max_tokens=16, seed=3).sequences[0]
        assert run.tokens(job_id) == [alone.tokens.tolist()]
        got = run.result(job_id).sequences[0].logprobs
        np.testing.assert_allclose(got, alone.logprobs, atol=1e-5)


def test_equal_seeds_give_equal_tokens_whatever_the_company(model):
    prompt = prompt_of(10)
    alone = sample(model, prompt, max_tokens=20, num_samples=3, seed=42)
    crowd = Run(model, model.sampler(kv_tokens=240, max_pass_tokens=16))
    for i in range(6):
        crowd.add(prompt_of(5 + i, i), max_tokens=20, temperature=0.5 + i / 4)
    job_id = crowd.add(prompt, max_tokens=20, num_samples=3, seed=42)
    crowd.add(prompt, max_tokens=20, num_samples=2, seed=43)
    assert crowd.tokens(job_id) == [s.tokens.tolist() for s in alone.sequences]
    assert len({tuple(tokens) for tokens in crowd.tokens(job_id)}) == 3


def test_without_a_seed_two_runs_differ(model):
    one, two = (sample(model, prompt_of(10), max_tokens=20) for _ in range(2))
    assert one.sequences[0].tokens.tolist() != two.sequences[0].tokens.tolist()


# ------------------------------------------------------------------------------------------ ends


def test_the_models_own_end_token_stops_and_is_part_of_the_output(model):
    run = Run(model, model.sampler())
    ids = [run.add(prompt_of(4, i), stop_tokens=None, max_tokens=400, seed=i) for i in range(8)]
    for job_id in ids:
        sequence = run.result(job_id).sequences[0]
        ended = sequence.stop_reason == "stop"
        assert (5 in sequence.tokens) == ended
        assert not ended or sequence.tokens.tolist().index(5) == len(sequence.tokens) - 1
    assert any(run.result(job_id).sequences[0].stop_reason == "stop" for job_id in ids)


def test_an_empty_stop_list_lets_nothing_stop_but_max_tokens(model):
    biased = sample(model, prompt_of(4, 0), stop_tokens=(), max_tokens=400, seed=0)
    assert biased.sequences[0].stop_reason == "length"
    assert len(biased.sequences[0].tokens) == 400


def test_a_stop_string_across_tokens_ends_the_output_once(model):
    free = sample(model, prompt_of(9), temperature=0.0, max_tokens=20).sequences[0].tokens.tolist()
    text = detokenize(free)
    stop = text[5:8]  # Begins inside token 2 and ends inside token 3.
    first = text.index(stop)
    result = sample(
        model, prompt_of(9), temperature=0.0, max_tokens=20, stop_tokens=None, stop_strings=(stop,)
    )
    sequence = result.sequences[0]
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == free[: (first + 2) // 2 + 1]
    assert detokenize(sequence.tokens).count(stop) == 1


def test_max_tokens_none_generates_until_the_context_is_full(model):
    result = sample(model, prompt_of(500), max_tokens=None)
    assert len(result.sequences[0].tokens) == 12
    assert result.sequences[0].stop_reason == "length"


# ---------------------------------------------------------------------------------------- scores


def test_prompt_scores_come_in_every_layout_asked_for(model):
    prompt = prompt_of(20)
    targets = np.array([[t, 7, -1] for t in prompt[1:]])
    result = sample(
        model,
        prompt,
        model.sampler(max_pass_tokens=6),
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=4,
        target_prompt_logprobs=targets,
        max_tokens=2,
    )
    expected = trainer_logprobs(model, prompt)
    dense = result.target_prompt_logprobs
    np.testing.assert_allclose(dense[:, 0], expected, atol=1e-5)
    assert np.isnan(dense[:, 2]).all()
    top = result.topk_prompt
    assert top.token_ids.shape == (20, 3)
    assert top.logprobs[0].tolist() == [-99999.0] * 3
    assert (top.logprobs[1:, 0] >= expected - 1e-5).all()
    hits = top.token_ids[1:] == np.array(prompt[1:])[:, None]
    np.testing.assert_allclose(top.logprobs[1:][hits], expected[hits.any(1)], atol=1e-5)
    assert result.sequences[0].topk.token_ids.shape == (2, 4)


def test_sparse_targets_are_answered_sparsely(model):
    prompt = prompt_of(6)
    sparse = jobs.CsrArray(
        values=np.array([prompt[1], 9, prompt[3]]),
        crow_indices=np.array([0, 2, 2, 3, 3, 3]),
        col_indices=np.array([0, 1, 0]),
        shape=(5, 2),
    )
    result = sample(model, prompt, target_prompt_logprobs=sparse, max_tokens=1)
    scores = result.target_prompt_logprobs
    expected = trainer_logprobs(model, prompt)
    np.testing.assert_allclose(scores.values[[0, 2]], expected[[0, 2]], atol=1e-5)
    assert scores.shape == (5, 2)


def test_last_n_scores_the_end_only_and_reuses_the_rest(model):
    sampler, prompt = model.sampler(), prompt_of(30)
    sample(model, prompt, sampler, max_tokens=1)
    result = sample(
        model, prompt, sampler, prompt_logprobs=True, prompt_logprobs_last_n=4, max_tokens=1
    )
    assert np.isnan(result.prompt_logprobs[:26]).all()
    np.testing.assert_allclose(
        result.prompt_logprobs[26:], trainer_logprobs(model, prompt)[25:], atol=1e-5
    )
    assert result.prompt_cache_hit_tokens == 24


def test_alternative_prompt_tokens_carry_their_logprobs(model):
    prompt = prompt_of(8)
    result = sample(model, prompt, prompt_alt_tokens_k=5, max_tokens=1, seed=1)
    again = sample(model, prompt, prompt_alt_tokens_k=5, max_tokens=1, seed=1)
    alt = result.prompt_alt
    assert alt.token_ids.shape == (7, 5)
    assert alt.token_ids.tolist() == again.prompt_alt.token_ids.tolist()
    for i in range(7):
        for token, logprob in zip(alt.token_ids[i], alt.logprobs[i], strict=True):
            expected = trainer_logprobs(model, [*prompt[: i + 1], int(token)])[-1]
            assert logprob == pytest.approx(expected, abs=1e-5)


def test_greedy_reports_logprobs_at_temperature_one(model):
    prompt = prompt_of(8)
    sequence = sample(model, prompt, temperature=0.0).sequences[0]
    expected = trainer_logprobs(model, prompt + sequence.tokens.tolist())
    np.testing.assert_allclose(sequence.logprobs, expected[7:], atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_alternatives_have_their_shape_for_any_number_of_tokens(model, num_tokens):
    """To no token at all, and more of them than the vocabulary has."""
    k = VOCAB + 3
    result = sample(model, prompt_of(4), max_tokens=num_tokens, topk_sample_logprobs=k)
    topk = result.sequences[0].topk
    assert topk.token_ids.shape == topk.logprobs.shape == (num_tokens, k)
    assert (topk.logprobs[:, VOCAB:] == -99999.0).all()
    assert (topk.logprobs[:, :VOCAB] > -99999.0).all()


def test_zero_max_tokens_scores_the_prompt_and_samples_nothing(model):
    result = sample(model, prompt_of(8), max_tokens=0, prompt_logprobs=True)
    assert len(result.sequences[0].tokens) == 0
    np.testing.assert_allclose(
        result.prompt_logprobs[1:], trainer_logprobs(model, prompt_of(8)), atol=1e-5
    )


# ---------------------------------------------------------------------------------------- memory


def test_samples_of_one_prompt_prefill_it_once(model):
    sampler = model.sampler()
    run = Run(model, sampler)
    run.add(prompt_of(30), num_samples=8, max_tokens=4)
    assert sampler.step() == 30
    assert sampler.step() == 8


def test_looking_ahead_throws_away_no_more_than_one_pass_of_an_ended_sample(model):
    """The pass launched before a stop was read computes a row for nothing; the tokens are equal."""
    sampler = model.sampler()
    run = Run(model, sampler)
    stops = tuple(range(0, VOCAB, 9))
    ids = [run.add(prompt_of(7, i), stop_tokens=stops, max_tokens=30, seed=i) for i in range(6)]
    tokens = [run.tokens(i)[0] for i in ids]
    alone = [
        sample(model, prompt_of(7, i), stop_tokens=stops, max_tokens=30, seed=i) for i in range(6)
    ]
    assert tokens == [result.sequences[0].tokens.tolist() for result in alone]
    assert len({len(t) for t in tokens}) > 2
    if model.looks_ahead:
        assert sampler._graphs.num_ahead >= max(len(t) for t in tokens) - 3
    assert not sampler.scheduler.running
    assert sampler.scheduler.pool.num_available == sampler.scheduler.pool.num_blocks


def test_a_job_that_finds_no_room_says_once_what_it_waits_for(model):
    few_places = Run(model, model.sampler(max_running=2))
    first, second, third, fourth = (few_places.add(prompt_of(5, i)) for i in range(4))
    few_places.finish()
    assert few_places.waits(first) == few_places.waits(second) == []
    third_s, fourth_s = few_places.waits(third), few_places.waits(fourth)
    assert third_s == ["waits for one of 2 places in the sampler", "sampling"]
    assert fourth_s == ["waits for one of 2 places in the sampler, 1 before it", "sampling"]
    little_memory = Run(model, model.sampler(kv_tokens=40))
    ids = [little_memory.add(prompt_of(24, i), max_tokens=6) for i in range(2)]
    little_memory.finish()
    assert [little_memory.waits(i) for i in ids] == [
        [],
        ["waits for memory for keys and values in the sampler", "sampling"],
    ]


def test_cancel_frees_the_slot_at_once_and_others_go_on(model):
    sampler = model.sampler(max_running=2)
    run = Run(model, sampler)
    long = run.add(prompt_of(5), num_samples=2, max_tokens=300)
    short = run.add(prompt_of(6), max_tokens=3)
    for _ in range(3):
        sampler.step()
    assert sampler.cancel(long)
    assert not sampler.cancel(long)
    assert run.events[long][-1].category == "cancelled"
    left = [*sampler.scheduler.running, *sampler.scheduler.waiting]
    assert [s.request.job.job_id for s in left] == [short]
    assert len(run.result(short).sequences[0].tokens) == 3


def test_a_job_whose_result_cannot_be_made_has_an_end_too(model, monkeypatch):
    run = Run(model, model.sampler())
    job_id = run.add(prompt_of(5), max_tokens=1)
    fault = Mock(side_effect=ValueError("no such shape"))
    monkeypatch.setattr("tinkex.engine.sample.sampler.result_of", fault)
    with pytest.raises(ValueError, match="no such shape"):
        run.finish()
    run.sampler.fail_all("the sampling pass failed")
    assert isinstance(run.events[job_id][-1], jobs.Failed)


def test_streamed_tokens_are_the_result(model):
    run = Run(model, model.sampler())
    job_id = run.add(prompt_of(5), num_samples=2, max_tokens=6, stream=True)
    result = run.result(job_id)
    for i, sequence in enumerate(result.sequences):
        parts = [e for e in run.events[job_id] if isinstance(e, jobs.Tokens)]
        mine = [e for e in parts if e.sample_index == i]
        assert np.concatenate([e.tokens for e in mine]).tolist() == sequence.tokens.tolist()
        assert np.concatenate([e.logprobs for e in mine]).tolist() == sequence.logprobs.tolist()


def test_a_diverged_adapter_fails_alone_and_leaves_no_trace_in_the_cache(model):
    bad = model.adapters["one"].frozen_copy()
    for tensor in bad.parameters():
        tensor.fill_(float("nan"))
    model.adapters["bad"] = bad
    sampler = model.sampler(kv_tokens=64)
    run = Run(model, sampler)
    failed = run.add(prompt_of(9), adapter="bad")
    good = run.add(prompt_of(9), seed=1)
    assert run.tokens(good) == [sample(model, prompt_of(9), seed=1).sequences[0].tokens.tolist()]
    assert run.events[failed][-1].category == "user"
    message = run.events[failed][-1].message
    assert "an adapter of " in message
    assert "earlier checkpoint" in message
    assert "bad" not in message  # the folder is the server's business
    assert torch.isfinite(sampler.cache.k).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, VOCAB]}, r"prompt\[1\]: token 199 is outside the vocabulary 0..198"),
        ({"prompt": [1], "max_tokens": 512}, "exceeds the model's context of 512"),
        ({"prompt": [1], "max_tokens": 100}, "the cache holds 64"),
        ({"prompt": [1] * 70, "max_tokens": None}, "the cache holds 64"),
        ({"prompt": [1], "temperature": -1.0}, "temperature: must be"),
        ({"prompt": [1], "temperature": float("nan")}, "temperature: must be"),
        ({"prompt": [1], "top_p": 0.0}, "top_p: must be"),
        ({"prompt": [1], "num_samples": 0}, "num_samples: must be"),
        ({"prompt": [1, 2], "target_prompt_logprobs": np.array([[1], [2]])}, r"shape \[1, K\]"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_changes(model, fields, message):
    run = Run(model, model.sampler(kv_tokens=64))
    with pytest.raises(InvalidInputError, match=message):
        run.add(**fields)
    assert not run.sampler.has_work
    assert len(run.tokens(run.add(prompt_of(5)))[0]) == 8


def test_decoder_is_ours(model):
    assert isinstance(model.decoder, Decoder)


# ------------------------------------------------------------------------------------ memory


def _forgetful(
    monkeypatch: pytest.MonkeyPatch, model: Model, is_too_much: Callable[[torch.Tensor], bool]
) -> list[int]:
    """Passes whose tokens are too much find no memory; gives the sizes of all that were tried."""
    forward, sizes = model.decoder.forward, []

    def tried(tokens_T: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(len(tokens_T))
        hidden = forward(tokens_T, *rest, **options)  # what is written by then is written
        if is_too_much(tokens_T):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return hidden

    monkeypatch.setattr(model.decoder, "forward", tried)
    return sizes


def _several(run: Run) -> list[str]:
    return [
        run.add(prompt_of(60), num_samples=3, seed=1, prompt_logprobs=True),
        run.add(prompt_of(20, seed=2), adapter="one", seed=2, max_tokens=20),
        run.add(prompt_of(60), num_samples=2, seed=3, topk_sample_logprobs=2),
    ]


def test_a_pass_that_finds_no_memory_is_made_smaller_and_nothing_of_it_shows(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Run(model, model.sampler(max_pass_tokens=64))
    expected = [(calm.tokens(name), calm.result(name).prompt_logprobs) for name in _several(calm)]
    sizes = _forgetful(monkeypatch, model, lambda tokens_T: len(tokens_T) > 12)
    run = Run(model, model.sampler(max_pass_tokens=64))
    for name, (tokens, scores) in zip(_several(run), expected, strict=True):
        assert run.tokens(name) == tokens
        if scores is not None:
            np.testing.assert_allclose(run.result(name).prompt_logprobs, scores, atol=1e-5)
    assert max(sizes) > 12
    assert run.sampler.scheduler.num_preempted > 0


def test_the_job_to_blame_fails_with_numbers_and_the_others_go_on(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = Run(model, model.sampler(max_pass_tokens=64))
    expected = [calm.tokens(name) for name in _several(calm)]
    _forgetful(monkeypatch, model, lambda tokens_T: bool((tokens_T == 3).any()))
    run = Run(model, model.sampler(max_pass_tokens=64))
    names = _several(run)
    for _ in range(3):
        run.sampler.step()
    hog = run.add([3] * 100, num_samples=4, logit_bias={3: -100.0})
    assert [run.tokens(name) for name in names] == expected
    (failed,) = [event for event in run.events[hog] if isinstance(event, jobs.Failed)]
    assert failed.category == "server"
    assert "Tried to allocate 2.00 GiB" in failed.message
    assert "of this job, whose prompt has 100; ask for fewer samples" in failed.message
    assert run.sampler.scheduler.pool.num_available == run.sampler.scheduler.pool.num_blocks


def test_larger_passes_are_tried_again_after_many_small_ones(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_short = [True]
    _forgetful(monkeypatch, model, lambda tokens_T: is_short[0] and len(tokens_T) > 12)
    run = Run(model, model.sampler(max_pass_tokens=64))
    run.tokens(run.add(prompt_of(60), max_tokens=4))
    assert run.sampler.scheduler.config.max_pass_tokens == 7, "an eighth of what failed"
    is_short[0] = False
    run.tokens(run.add(prompt_of(20), max_tokens=100))
    assert run.sampler.scheduler.config.max_pass_tokens == 64

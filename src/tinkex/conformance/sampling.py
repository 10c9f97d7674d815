"""Checks of sampling: promises, lengths, seeds, stops, log-probabilities, snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinkex.conformance.probe import TOKENS, Probe, datum, logprobs_of
from tinkex.conformance.suite import Unsupported, check, expect
from tinkex.wire import tinker_public_pb2 as pb


def _tokens(sequence: pb.SampledSequence) -> list[int]:
    return [int(token) for token in np.frombuffer(sequence.tokens, "<i4")]


def _prompt_logprobs(response: pb.SampleResponse) -> Any:
    return np.frombuffer(response.prompt_logprobs, "<f4")


@check("2.1", "asample's promise names one sequence id per sample")
def sequence_ids(probe: Probe) -> None:
    promise, response = probe.sample(num_samples=3)
    ids = promise.get("sample_sequence_ids")
    expect(isinstance(ids, list) and len(set(ids)) == 3, "3 different sample_sequence_ids", ids)
    expect(len(response.sequences) == 3, "3 sequences", len(response.sequences))


@check("6.1", "max_tokens is kept, and every token has a logprob")
def lengths(probe: Probe) -> None:
    _, response = probe.sample(sampling_params={"max_tokens": 5, "stop": []})
    sequence = response.sequences[0]
    expect(len(_tokens(sequence)) == 5, "5 tokens with stop=[]", _tokens(sequence))
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    good = len(logprobs) == 5 and bool(np.all(np.isfinite(logprobs)) and np.all(logprobs <= 0))
    expect(good, "5 finite logprobs at most 0", logprobs.tolist())
    expect(sequence.stop_reason == pb.STOP_REASON_LENGTH, "LENGTH", sequence.stop_reason)


@check("6.1", "a stop token ends the sequence, included once")
def stop_token(probe: Probe) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 6, "stop": []}
    _, free = probe.sample(sampling_params=greedy)
    # Whatever the model says greedily, its third token is one that it would say again.
    tokens = _tokens(free.sequences[0])
    _, stopped = probe.sample(sampling_params={**greedy, "stop": [tokens[2]]})
    wanted = tokens[: tokens.index(tokens[2]) + 1]
    got = _tokens(stopped.sequences[0])
    expect(got == wanted, f"{wanted}, ending with the stop token", got)
    reason = stopped.sequences[0].stop_reason
    expect(reason == pb.STOP_REASON_STOP, "stop_reason STOP", reason)


@check("6.1", "temperature 0 is greedy: twice the same")
def greedy(probe: Probe) -> None:
    params = {"temperature": 0.0, "max_tokens": 8}
    first, second = (_tokens(probe.sample(sampling_params=params)[1].sequences[0]) for _ in "ab")
    expect(first == second, f"{first} again", second)


@check("6.1", "a seed repeats a sample, and samples of one request differ")
def seeds(probe: Probe) -> None:
    fields: dict[str, Any] = {
        "num_samples": 4,
        "sampling_params": {"seed": 7, "max_tokens": 12, "temperature": 1.0, "stop": []},
    }
    first, second = (
        [_tokens(sequence) for sequence in probe.sample(**fields)[1].sequences] for _ in "ab"
    )
    expect(first == second, f"{first} again", second)
    expect(len({tuple(tokens) for tokens in first}) > 1, "samples that differ", first)


@check("6.1", "prompt logprobs: one per prompt token, NaN at position 0")
def prompt_logprobs(probe: Probe) -> None:
    _, response = probe.sample(prompt_logprobs=True, sampling_params={"max_tokens": 1})
    values = _prompt_logprobs(response)
    expect(len(values) == len(TOKENS), f"{len(TOKENS)} values", len(values))
    good = bool(np.isnan(values[0]) and np.all(np.isfinite(values[1:])))
    expect(good, "NaN, then finite", values.tolist())


@check("6.1", "top-k logprobs have the shape asked for, best first")
def topk(probe: Probe) -> None:
    _, response = probe.sample(
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        sampling_params={"max_tokens": 2, "stop": []},
    )
    top = response.topk_prompt_logprobs
    if not top.k:
        raise Unsupported("no top-k prompt logprobs came")
    expect(top.k == 3, "k 3", top.k)
    # The first prompt token follows nothing: its row is padding.
    rows = np.frombuffer(top.logprobs, "<f4").reshape(top.length, top.k)[1:]
    expect(bool(np.all(np.diff(rows, axis=1) <= 0)), "descending logprobs", rows.tolist())
    sampled = response.sequences[0].topk_sampled_logprobs
    expect((sampled.k, sampled.length) == (2, 2), "k 2, length 2", (sampled.k, sampled.length))


@check("6.1", "prompt_logprobs_last_n leaves earlier positions out")
def last_n(probe: Probe) -> None:
    _, response = probe.sample(
        prompt_logprobs=True, prompt_logprobs_last_n=2, sampling_params={"max_tokens": 1}
    )
    values = _prompt_logprobs(response)
    good = bool(np.all(np.isnan(values[:-2])) and np.all(np.isfinite(values[-2:])))
    expect(good, "NaN before the last 2", values.tolist())


@check("6.1", "sampler and trainer agree on log-probabilities")
def agreement(probe: Probe) -> None:
    run = probe.run
    trained = logprobs_of(run.forward_backward([datum()], forward_only=True))[0]
    _, response = probe.sample(prompt_logprobs=True, sampling_params={"max_tokens": 1})
    # B of a fresh adapter is zero, so trainer and base model are the same function; bf16 and
    # other kernels account for hundredths of a nat.
    gap = float(np.max(np.abs(_prompt_logprobs(response)[1:] - trained)))
    expect(gap < 0.1, "a fresh adapter within 0.1 nats of the base model", f"{gap:.4f}")


@check("2.3", "a sampler snapshot does not change when training goes on")
def snapshot(probe: Probe) -> None:
    run = probe.new_run()
    path = str(run.submit("save_weights_for_sampler", path="conformance-frozen").get("path"))
    expect(path.startswith("tinker://"), "a tinker:// path", path)
    before = _score(probe, path)
    run.forward_backward([datum()])
    run.optim_step(5e-2)
    after = _score(probe, path)
    gap = float(np.max(np.abs(after - before)))
    expect(gap < 1e-3, "the same logprobs after more training", f"{gap:.4f} apart")


def _score(probe: Probe, path: str) -> Any:
    sampler = probe.new_sampler(path)
    _, response = probe.sample(sampler, prompt_logprobs=True, sampling_params={"max_tokens": 1})
    return _prompt_logprobs(response)[1:]


@check("2.3", "an unnamed save gives a sampling session at once")
def unnamed(probe: Probe) -> None:
    run = probe.new_run()
    answer = run.submit("save_weights_for_sampler", sampling_session_seq_id=next(probe.sampler_seq))
    sampler = answer.get("sampling_session_id")
    expect(isinstance(sampler, str), "sampling_session_id", answer)
    probe.sample(str(sampler))


@check("2.3", "training weights can be sampled as well")
def sample_training_weights(probe: Probe) -> None:
    path = probe.new_run().save("conformance-sampled")
    _score(probe, path)


@check("4.5", "the batched poller reports what is finished")
def batched(probe: Probe) -> None:
    probe.require("sample_use_retrieve_futures")
    sampler = probe.new_sampler()
    request_id = probe.promise("asample", probe.sample_body(sampler))["request_id"]
    cursor, is_finished = 0, False
    for _ in range(20):
        answer = probe.ask(
            "POST",
            "retrieve_futures",
            {
                "target": {
                    "type": "sampling_session",
                    "sampling_session_id": sampler,
                    "cloned_sampler_id": 0,
                },
                "prev_cursor": cursor,
                "retrieved_request_ids": [],
            },
        )
        cursor = answer["cursor"]
        is_finished = any(
            item["request_id"] == request_id and item["state"] == "finished"
            for item in answer["completions"]
        )
        if is_finished:
            break
    expect(is_finished, f"a completion of {request_id}", "none")
    probe.wait(str(request_id), pb.SampleResponse)


@check("4.3", "cancel_future is accepted")
def cancel(probe: Probe) -> None:
    body = probe.sample_body(sampling_params={"max_tokens": 64, "stop": []})
    request_id = probe.promise("asample", body)["request_id"]
    probe.ask("POST", "cancel_future", {"request_id": request_id})


@check("6.1", "a bad sampling request is refused")
def refused(probe: Probe) -> None:
    body = probe.sample_body(sampling_params={"temperature": -1.0})
    answer = probe.call("POST", "asample", body)
    probe.expect_refusal(answer, " for temperature -1", category="user")

"""What finished work took, told to everybody who counts it.

The usage that is billed, budgets, the rates by which later work is estimated, and the timeline of
its user. Tokens of training requests are counted where the operation knows them (`operations`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from tinkex.engine.jobs import SampleResult
from tinkex.server.files.checkpoints import parse_path
from tinkex.server.runs.rates import PREFILL, SAMPLE
from tinkex.server.runs.timeline import SAMPLE_PARTS, SAMPLES, SAMPLES_WAIT, Details, TimelineSpan
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.queued_request import QueuedRequest
from tinkex.server.work.sample_run import SampleRun
from tinkex.store import Model, SamplingSession, UsageKind


def count_request(
    deps: Dependencies, model: Model, request: QueuedRequest, ended_at: float
) -> None:
    """Count the seconds that a worker had a request of a model."""
    operation, key_id = request.operation, request.key_id
    assert operation is not None
    part = operation.part_of_step
    seconds = deps.curves.worked(model, key_id, part, request.started_at, ended_at)
    owner = model.user_id, key_id, model.model_id, model.base_model
    deps.open_work.budgets.count(*owner, {"device_seconds": seconds})
    amount = sum(operation.tokens(request.checked).values()) or 1
    deps.rates.note(deps.catalog.engine_name(model.base_model), operation.name, amount, seconds)


def count_sample(deps: Dependencies, run: SampleRun, result: SampleResult) -> None:
    """Count the tokens and seconds of a sample, and end its reservation."""
    cached = result.prompt_cache_hit_tokens
    counts: dict[UsageKind, float] = {
        "sampling_prefill": result.num_prompt_tokens - cached,
        "sampling_prefill_cached": cached,
        "sampling_sample": result.num_sampled_tokens,
        "device_seconds": result.device_seconds,
    }
    _count(deps, run, counts)
    _note_rates(deps, run.session.base_model, result)
    # Before the result is told: the next request of its client must find the room.
    deps.open_work.budgets.release(run.reservation)


def count_told(deps: Dependencies, run: SampleRun) -> None:
    """Count what a stream told before it was cut off: its client has these tokens.

    The seconds are what as many tokens took before; work of which nothing was told is not counted.
    """
    if not run.num_told:
        return
    base_model, num_prompt = deps.catalog.engine_name(run.session.base_model), len(run.job.prompt)
    amounts = {PREFILL: num_prompt, SAMPLE: run.num_told}
    rates = {work: deps.rates.rate(base_model, work) or 0.0 for work in amounts}
    counts: dict[UsageKind, float] = {
        "sampling_prefill": num_prompt,
        "sampling_sample": run.num_told,
        "device_seconds": sum(rates[work] * amount for work, amount in amounts.items()),
    }
    _count(deps, run, counts)


def _count(deps: Dependencies, run: SampleRun, counts: Mapping[UsageKind, float]) -> None:
    session, run_id = run.session, run_of(run.session)
    deps.store.usage.add_kinds(
        {kind: count for kind, count in counts.items() if count},
        user_id=run.user_id,
        session_id=session.session_id,
        model_id=run_id,
        base_model=session.base_model,
        key_id=run.key_id,
    )
    deps.open_work.budgets.count(run.user_id, run.key_id, run_id, session.base_model, counts)


def _note_rates(deps: Dependencies, base_model: str, result: SampleResult) -> None:
    """Note how long a prompt and its answers took: their shares of the passes they were in."""
    base_model = deps.catalog.engine_name(base_model)
    computed = result.num_prompt_tokens - result.prompt_cache_hit_tokens
    spans = {name: ended_at - began_at for name, began_at, ended_at, _ in result.turns}
    whole = sum(spans.values()) or 1.0
    for work, span, amount in (
        (PREFILL, "prefill", computed),
        (SAMPLE, "decode", result.num_sampled_tokens),
    ):
        seconds = result.device_seconds * spans.get(span, 0.0) / whole
        deps.rates.note(base_model, work, amount, seconds)


def sample_spans(run: SampleRun, result: SampleResult) -> list[TimelineSpan]:
    """A sample on its user's timeline: its wait, itself, and its parts on the device."""
    ids = run.session.session_id, run_of(run.session) or ""
    details: Details = {
        "request_id": run.promise.request_id,
        "prompt_tokens": result.num_prompt_tokens,
        "cached_tokens": result.prompt_cache_hit_tokens,
        "sampled_tokens": result.num_sampled_tokens,
        "samples": len(result.sequences),
    }
    return [
        TimelineSpan(*ids, SAMPLES_WAIT, "sample", run.accepted_at, run.sent_at, details),
        TimelineSpan(*ids, SAMPLES, "sample", run.sent_at, time.time(), details),
        *(
            TimelineSpan(*ids, SAMPLE_PARTS, part, began_at, ended_at, {"tokens or steps": size})
            for part, began_at, ended_at, size in result.turns
        ),
    ]


def run_of(session: SamplingSession) -> str | None:
    """The id of the training run whose weights are sampled, when they are a run's."""
    if session.model_path is not None:
        return parse_path(session.model_path).run_id
    return session.model_id

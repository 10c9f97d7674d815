"""`/tinkex/v1/estimate`: what a run would use, by the rates, prices and budgets of this server."""

from __future__ import annotations

from fastapi import APIRouter

from tinkex.server.guard.budgets import LiveBudget
from tinkex.server.http.handlers import serve
from tinkex.server.operations.optim_step import OptimStep
from tinkex.server.operations.passes import Forward, ForwardBackward
from tinkex.server.operations.saves import SaveWeights, SaveWeightsForSampler
from tinkex.server.rest.budgets import info_of
from tinkex.server.runs.rates import (
    PREFILL,
    SAMPLE,
    SAMPLER_BYTES,
    STATE_BYTES,
    MeasuredRates,
)
from tinkex.server.service.service import Service
from tinkex.server.workers.catalog import Catalog
from tinkex.store import User
from tinkex.types.account.estimates import BudgetOutlook, Estimate, EstimateRequest

router = APIRouter(prefix="/tinkex/v1", tags=["budgets"])


@serve(router, "estimate")
async def estimate(service: Service, user: User, asked: EstimateRequest) -> Estimate:
    base_model = service.catalog.resolve(asked.base_model)
    await service.catalog.check_context(asked.base_model)
    if asked.run_id is not None:
        await service.model(user, asked.run_id)
    seconds = _seconds(asked, base_model, service.rates)
    scored = await _scored(asked, service.catalog)
    by_work = {f"{work} on {base_model}": took for work, took in seconds.items()}
    for model, num_tokens in scored.items():
        rate = service.rates.rate(model, PREFILL)
        by_work[f"{PREFILL} on {model}"] = None if rate is None else rate * num_tokens
    unmeasured = [work for work, took in by_work.items() if took is None]
    total = None if unmeasured else sum(took for took in by_work.values() if took is not None)
    counts = {
        f"{base_model} training": float(asked.training_tokens),
        f"{base_model} sampling_prefill": float(asked.forward_tokens + asked.prefill_tokens),
        f"{base_model} sampling_sample": float(asked.sample_tokens),
    }
    for model, num_tokens in scored.items():
        counts[f"{model} sampling_prefill"] = (
            counts.get(f"{model} sampling_prefill", 0.0) + num_tokens
        )
    budgets = service.budgets
    holding = budgets.holding(user.user_id, user.key_id, asked.run_id)
    return Estimate(
        device_seconds=total,
        unmeasured=unmeasured,
        rates={
            work: 1 / rate for work in seconds if (rate := service.rates.rate(base_model, work))
        },
        money=budgets.prices.cost(counts) if budgets.prices.per_million else None,
        budgets=[_outlook(live, counts, total) for live in holding],
        checkpoint_bytes=_checkpoint_bytes(asked, base_model, service.rates),
        disk_left_bytes=service.shelf.disk_quota.left(user.user_id),
    )


async def _scored(asked: EstimateRequest, catalog: Catalog) -> dict[str, int]:
    """The tokens that other base models score, by the engine's names of these."""
    scored: dict[str, int] = {}
    for name, num_tokens in asked.scored_tokens.items():
        base_model = catalog.resolve(name, path="scored_tokens")
        await catalog.check_context(name, path="scored_tokens")
        if num_tokens:
            scored[base_model] = scored.get(base_model, 0) + num_tokens
    return scored


def _seconds(
    asked: EstimateRequest, base_model: str, rates: MeasuredRates
) -> dict[str, float | None]:
    """The seconds of each kind of work that is asked for; None: never measured."""
    amounts: dict[str, int] = {
        ForwardBackward.name: asked.training_tokens,
        Forward.name: asked.forward_tokens,
        PREFILL: asked.prefill_tokens,
        SAMPLE: asked.sample_tokens,
        OptimStep.name: asked.steps,
        SaveWeights.name: asked.state_saves,
        SaveWeightsForSampler.name: asked.sampler_saves + asked.snapshots,
    }
    measured = {work: rates.rate(base_model, work) for work, amount in amounts.items() if amount}
    return {work: None if rate is None else rate * amounts[work] for work, rate in measured.items()}


def _checkpoint_bytes(asked: EstimateRequest, base_model: str, rates: MeasuredRates) -> int | None:
    """The bytes of all checkpoints; an adapter's grow with its rank."""
    saves: dict[str, int] = {
        STATE_BYTES: asked.state_saves,
        SAMPLER_BYTES: asked.sampler_saves,
    }
    total = 0.0
    for work, count in saves.items():
        rate = rates.rate(base_model, work)
        if count and rate is None:
            return None
        total += count * asked.rank * (rate or 0.0)
    return int(total)


def _outlook(live: LiveBudget, counts: dict[str, float], seconds: float | None) -> BudgetOutlook:
    budget = live.budget
    needed = seconds if budget.unit == "device_seconds" else live.measure(counts)
    left = max(0.0, budget.amount - live.spent - live.reserved)
    return BudgetOutlook(
        budget=info_of(live),
        left=left,
        needed=needed,
        is_passed=needed is not None and needed > left,
    )

"""How `--dry-run` shows the work of a run and what it takes, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tinkex.cli.output import properties, size

if TYPE_CHECKING:
    from tinkex import ServiceClient
    from tinkex.cli.state import State
    from tinkex.recipes.plans import Plan
    from tinkex.types.account.estimates import BudgetOutlook, Estimate

_UNITS = {"tokens": "tokens", "device_seconds": "seconds of the device", "money": "of money"}


def show_plan(
    state: State, recipe: str, config: Any, service: ServiceClient, inputs: tuple[Any, ...]
) -> None:
    """Show the work of a run and what it takes on this server; train nothing."""
    from tinkex.recipes import plans

    plan = getattr(plans, f"plan_{recipe}")(config, service, *inputs, on_note=state.note)
    estimate = plan.estimate(service).result()
    state.show(properties(None, _rows_of(plan, estimate)), _as_json(plan, estimate))


def _rows_of(plan: Plan, estimate: Estimate) -> dict[str, str]:
    """The rows of the table, each a name and a text."""
    left = plan.num_steps - plan.start
    rows = {"Steps": f"{left:,} after step {plan.start:,}" if plan.start else f"{left:,}"}
    counts = {
        "Trained tokens": "training_tokens",
        "Evaluated tokens": "forward_tokens",
        "Prefilled tokens": "prefill_tokens",
        "Sampled tokens": "sample_tokens",
    }
    for label, name in counts.items():
        if count := getattr(plan, name):
            rows[label] = f"{'at most ' if name in plan.at_most else ''}{count:,}"
    for model, count in plan.scored_tokens.items():
        rows[f"Scored by {model}"] = f"at most {count:,} tokens"
    rows["Time"] = _time(plan, estimate)
    if estimate.money is not None:
        rows["Money"] = f"{_bound(plan)}{estimate.money:,.4g}, by this server's prices"
    saves = plan.state_saves + plan.sampler_saves
    room = "size unknown: none of this model was saved here yet"
    if estimate.checkpoint_bytes is not None:
        room = f"about {size(estimate.checkpoint_bytes)}"
    if estimate.disk_left_bytes is not None:
        room += f"; you may store {size(estimate.disk_left_bytes)} more"
    rows["Checkpoints"] = f"{'at most ' if 'state_saves' in plan.at_most else ''}{saves}, {room}"
    for outlook in estimate.budgets:
        budget = outlook.budget
        rows[f"Budget of {budget.scope} {budget.subject}"] = _outlook(outlook, plan)
    return rows


def _bound(plan: Plan) -> str:
    return "at most " if "training_tokens" in plan.at_most else ""


def _time(plan: Plan, estimate: Estimate) -> str:
    if estimate.device_seconds is None:
        never = ", ".join(estimate.unmeasured)
        return f"unknown: this server has not done it yet ({never}); a short run measures it"
    about = _bound(plan) or "about "
    return f"{about}{_span(estimate.device_seconds)} of the device, with nothing else to do"


def _span(seconds: float) -> str:
    for length, noun in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {noun}"
    return f"{seconds:.1f} seconds"


def _outlook(outlook: BudgetOutlook, plan: Plan) -> str:
    unit = _UNITS[outlook.budget.unit]
    if outlook.needed is None:
        return f"{outlook.left:,.6g} {unit} left; what the run needs is unknown"
    needed = f"the run needs {_bound(plan)}{outlook.needed:,.6g}"
    verdict = "it would not fit" if outlook.is_passed else "it fits"
    if outlook.is_passed and _bound(plan):
        verdict = "it might not fit"
    return f"{outlook.left:,.6g} {unit} left, {needed}: {verdict}"


def _as_json(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    counted = {**asdict(plan), "at_most": sorted(plan.at_most)}
    return {"plan": counted, "estimate": estimate.to_dict()}

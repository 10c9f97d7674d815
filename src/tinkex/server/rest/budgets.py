"""`/tinkex/v1/budgets` and the same below `admin`: how much a user, a key or a run may use in all.

Users limit themselves, their keys and their runs; what an administrator set they cannot change.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path

from tinkex.server.guard.budgets import LiveBudget
from tinkex.server.http.handlers import serve
from tinkex.server.http.inputs import Text, moment
from tinkex.server.process.problems import ApiError
from tinkex.server.service.service import Service
from tinkex.store import BudgetScope, BudgetUnit, SpendingBudget, User
from tinkex.types.account.budgets import BudgetInfo, BudgetsResponse, SetBudgetRequest

router = APIRouter(prefix="/tinkex/v1", tags=["budgets"])
Scope = Annotated[BudgetScope, Path()]
Unit = Annotated[BudgetUnit, Path()]


@serve(router, "list_budgets")
async def list_budgets(service: Service, user: User) -> BudgetsResponse:
    return _listing(service, user.user_id)


@serve(router, "set_budget")
async def set_budget(
    service: Service, user: User, scope: Scope, subject: Text, unit: Unit, asked: SetBudgetRequest
) -> BudgetInfo:
    owner, subject = await _whose(service, scope, subject, user)
    if owner != user.user_id:
        raise ApiError(404, f"No {scope} {subject!r} of yours.")
    return await _set(service, user, scope, subject, unit, user.user_id, asked, by_admin=False)


@serve(router, "remove_budget")
async def remove_budget(
    service: Service, user: User, scope: Scope, subject: Text, unit: Unit
) -> None:
    _, subject_id = await _whose(service, scope, subject, user)
    live = service.budgets.find(scope, subject_id, unit)
    if live is None or live.budget.user_id != user.user_id:
        raise ApiError(404, f"No budget of {scope} {subject!r} in {unit}.")
    await _remove(service, user, live, by_admin=False)


@serve(router, "admin_list_budgets")
async def admin_list_budgets(service: Service, admin: User, user_id: Text) -> BudgetsResponse:
    return _listing(service, user_id)


@serve(router, "admin_set_budget")
async def admin_set_budget(
    service: Service, admin: User, scope: Scope, subject: Text, unit: Unit, asked: SetBudgetRequest
) -> BudgetInfo:
    user_id, subject = await _whose(service, scope, subject)
    if user_id is None:
        raise ApiError(404, f"No {scope} {subject!r}.")
    return await _set(service, admin, scope, subject, unit, user_id, asked, by_admin=True)


@serve(router, "admin_remove_budget")
async def admin_remove_budget(
    service: Service, admin: User, scope: Scope, subject: Text, unit: Unit
) -> None:
    live = service.budgets.find(scope, subject, unit)
    if live is None:
        raise ApiError(404, f"No budget of {scope} {subject!r} in {unit}.")
    await _remove(service, admin, live)


async def _whose(
    service: Service, scope: BudgetScope, subject: str, user: User | None = None
) -> tuple[str | None, str]:
    """The user whose work a budget of a subject limits, and the id of the subject.

    None, and the subject as it was asked for, where there is no such thing. Users may call their
    runs by name.
    """
    store = service.store
    if scope == "user":
        owner = await store.call(store.accounts.get_user, subject)
        return (None if owner is None else owner.user_id), subject
    if scope == "run":
        find = store.models.get if user is None else partial(store.models.find, user.user_id)
        model = await store.call(find, subject)
        return (None, subject) if model is None else (model.user_id, model.model_id)
    # As it is written in the column, of 32 bits in PostgreSQL: "007" would limit nothing.
    if not subject.isdecimal() or str(int(subject)) != subject or int(subject) >= 2**31:
        return None, subject
    key = await store.call(store.accounts.get_key, int(subject))
    return (None if key is None else key.user_id), subject


async def _set(
    service: Service,
    who: User,
    scope: BudgetScope,
    subject: str,
    unit: BudgetUnit,
    user_id: str,
    asked: SetBudgetRequest,
    *,
    by_admin: bool,
) -> BudgetInfo:
    budgets = service.budgets
    if unit == "money" and not budgets.prices.per_million:
        raise ApiError(
            400, "This server has no prices, so nothing costs money. Start it with --price."
        )
    known = budgets.find(scope, subject, unit)
    subject = known.budget.subject if known else await budgets.first_of(scope, subject)
    service.ends.flush()  # what has ended counts as used before
    before = known.budget.before if known else await budgets.used(scope, subject, user_id)
    live = await budgets.put(
        SpendingBudget(
            scope=scope,
            subject=subject,
            unit=unit,
            user_id=user_id,
            amount=asked.amount,
            pauses=asked.at_edge == "pause",
            by_admin=by_admin,
            set_at=time.time() if known is None else known.budget.set_at,
            before=before,
        )
    )
    details = {"scope": scope, "subject": subject, "unit": unit, "amount": asked.amount}
    service.store.audit.record(who.user_id, "budget_set", details | {"at_edge": asked.at_edge})
    return info_of(live)


async def _remove(service: Service, who: User, live: LiveBudget, *, by_admin: bool = True) -> None:
    await service.budgets.remove(live, by_admin=by_admin)
    budget = live.budget
    details = {"scope": budget.scope, "subject": budget.subject, "unit": budget.unit}
    service.store.audit.record(who.user_id, "budget_removed", details)


def _listing(service: Service, user_id: str) -> BudgetsResponse:
    budgets = service.budgets
    return BudgetsResponse(
        budgets=[info_of(live) for live in budgets.of_user(user_id)],
        prices=dict(budgets.prices.per_million),
    )


def info_of(live: LiveBudget) -> BudgetInfo:
    budget = live.budget
    return BudgetInfo(
        scope=budget.scope,
        subject=budget.subject,
        unit=budget.unit,
        amount=budget.amount,
        spent=live.spent,
        reserved=live.reserved,
        at_edge="pause" if budget.pauses else "refuse",
        by_admin=budget.by_admin,
        set_at=moment(budget.set_at),
    )

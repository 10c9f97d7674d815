"""Budgets: hard limits on what a user, a key or a run may use in all. An extension of ours."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.types.fields.message import Listing, Request, Response

BudgetScopeName: TypeAlias = Literal["user", "key", "run"]
BudgetUnitName: TypeAlias = Literal["tokens", "device_seconds", "money"]
AtEdge: TypeAlias = Literal["refuse", "pause"]
"""What happens to work that a budget has no room for: it fails, or waits until there is more."""


class BudgetInfo(Response):
    """A budget, and what counts against it."""

    scope: BudgetScopeName
    subject: str
    """The id of the user or run, or the number of the key."""
    unit: BudgetUnitName
    amount: float
    spent: float
    """Since it was set."""
    reserved: float
    """The most that requests under way can use."""
    at_edge: AtEdge
    by_admin: bool
    """Only administrators change it."""
    set_at: datetime


class BudgetsResponse(Response):
    """The budgets of a user."""

    budgets: Listing[BudgetInfo]
    prices: dict[str, float] = Field(default_factory=dict)
    """Of a million tokens by kind, or by `MODEL kind`; empty where the server has none."""


class SetBudgetRequest(Request):
    amount: Annotated[float, Field(ge=0, le=1e18)]
    at_edge: AtEdge = "refuse"

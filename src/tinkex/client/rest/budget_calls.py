"""Calls that limit what a user, a key or a run may use in all: users' own, and administrators'."""

from __future__ import annotations

from typing import ClassVar

from tinkex.client.futures import APIFuture
from tinkex.client.http.options import Options
from tinkex.client.rest.caller import Caller, quoted
from tinkex.client.twins import awaited
from tinkex.types.account.budgets import (
    AtEdge,
    BudgetInfo,
    BudgetScopeName,
    BudgetUnitName,
    SetBudgetRequest,
)


class BudgetCalls(Caller):
    _row_prefix: ClassVar[str] = ""
    """Before the names of the endpoints."""

    def set_budget(
        self,
        scope: BudgetScopeName,
        subject: str | int,
        amount: float,
        unit: BudgetUnitName = "tokens",
        at_edge: AtEdge = "refuse",
        *,
        options: Options = None,
    ) -> APIFuture[BudgetInfo]:
        """Limit what a user, a key or a run may use from now on. An extension of our servers.

        Args:
            scope: `user`, `key` or `run`.
            subject: The id of the user or run, or the number of the key.
            amount: The most that may be used, in `unit`. Set again, it raises or lowers the limit,
                and what was spent stays spent.
            unit: `tokens`, `device_seconds`, or `money` by the prices of the server.
            at_edge: `refuse` fails work that has no room; `pause` lets it wait for more.
        """
        return self._ask(
            "set_budget",
            f"{self._row_prefix}set_budget",
            SetBudgetRequest(amount=amount, at_edge=at_edge),
            scope=scope,
            subject=quoted(str(subject), "subject"),
            unit=unit,
            options=options,
        )

    set_budget_async = awaited(set_budget)

    def remove_budget(
        self,
        scope: BudgetScopeName,
        subject: str | int,
        unit: BudgetUnitName = "tokens",
        *,
        options: Options = None,
    ) -> APIFuture[None]:
        """Take a limit away; what waited for it goes on."""
        row = f"{self._row_prefix}remove_budget"
        part = quoted(str(subject), "subject")
        return self._ask(
            "remove_budget", row, scope=scope, subject=part, unit=unit, options=options
        )

    remove_budget_async = awaited(remove_budget)

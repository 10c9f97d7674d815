"""`tinkex budget ...`: how much a user, a key or a run may use in all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tinkex.cli.listing import Listing
from tinkex.cli.output import Table, properties
from tinkex.cli.state import Noun, State, pass_state
from tinkex.contract.amounts import amount_of
from tinkex.types.account.budgets import AtEdge, BudgetScopeName, BudgetUnitName

if TYPE_CHECKING:
    from tinkex.types.account.budgets import BudgetInfo

_SCOPES = click.Choice(["user", "key", "run"])
_UNITS: tuple[BudgetUnitName, ...] = ("tokens", "device_seconds", "money")
_ADMIN = click.option("--admin", "as_admin", is_flag=True, help="Act as an administrator.")


def _figure(value: float) -> str:
    return f"{value:,.12g}"


_BUDGETS = Listing(
    "budgets",
    "Budgets",
    {
        "Of": lambda budget: f"{budget.scope} {budget.subject}",
        "Unit": "unit",
        "Amount": lambda budget: _figure(budget.amount),
        "Spent": lambda budget: _figure(budget.spent),
        "Reserved": lambda budget: _figure(budget.reserved),
        "At the edge": "at_edge",
        "Set by": lambda budget: "administrator" if budget.by_admin else "user",
    },
)


@click.group(cls=Noun)
def budget() -> None:
    """Limit what a user, a key or a run may use in all."""


@budget.command("list")
@click.option("--user", help="Of another user, for administrators.")
@pass_state
def list_(state: State, user: str | None) -> None:
    """List budgets, with what was spent of each."""
    if user is None:
        with state.rest() as rest:
            answer = rest.list_budgets().result()
    else:
        with state.admin() as admin:
            answer = admin.list_budgets(user).result()
    state.show_items(_BUDGETS, answer.budgets, prices=answer.prices)


@budget.command("set")
@click.argument("scope", type=_SCOPES)
@click.argument("subject")
@click.argument("limit", metavar="UNIT=AMOUNT")
@click.option("--pause", is_flag=True, help="Let work wait at the edge; by default it is refused.")
@_ADMIN
@pass_state
def set_(
    state: State, scope: BudgetScopeName, subject: str, limit: str, pause: bool, as_admin: bool
) -> None:
    """Set or change a budget, such as `tinkex budget set run RUN tokens=5M`.

    UNIT is tokens, device_seconds or money; AMOUNT may end in k, M, G or T. What was used before
    the budget was set does not count. A request is admitted when the most it can use still fits,
    so a budget of tokens or money is never passed.
    """
    unit, amount = _limit(limit)
    at_edge: AtEdge = "pause" if pause else "refuse"
    with state.admin() if as_admin else state.rest() as client:
        budget = client.set_budget(scope, subject, amount, unit, at_edge).result()
    state.show(lambda: _table(budget), budget)


@budget.command()
@click.argument("scope", type=_SCOPES)
@click.argument("subject")
@click.argument("unit", type=click.Choice(_UNITS), default="tokens")
@_ADMIN
@pass_state
def remove(
    state: State, scope: BudgetScopeName, subject: str, unit: BudgetUnitName, as_admin: bool
) -> None:
    """Remove a budget; what waited for it goes on."""
    with state.admin() if as_admin else state.rest() as client:
        client.remove_budget(scope, subject, unit).result()
    gone = {"scope": scope, "subject": subject, "unit": unit}
    state.show(properties(None, {"Removed": f"{unit} of {scope} {subject}"}), gone)


def _table(budget: BudgetInfo) -> Table:
    return properties(None, _BUDGETS.cells(budget))


def _limit(text: str) -> tuple[BudgetUnitName, float]:
    name, _, number = text.partition("=")
    unit = next((unit for unit in _UNITS if unit == name), None)
    amount = amount_of(number)
    if unit is None or not 0 <= amount <= 1e18:
        raise click.BadParameter(
            f"{text!r} is not UNIT=AMOUNT, such as tokens=5M; units are {', '.join(_UNITS)}."
        )
    return unit, amount

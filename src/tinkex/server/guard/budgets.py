"""Hard limits on what a user, a key or a run may use in all: tokens, seconds of the device, money.

A request is admitted when what was spent, what is reserved for requests under way, and the most
that it can use itself fit into every budget that holds for it. So no budget of tokens or money is
ever passed, whatever runs side by side. How long a request computes is known only afterwards: a
budget of seconds ends admission once it is used up, and what was admitted before still runs.

Requests that a restart takes up again were admitted before: they hold their part anew before any
other is judged. A resumed run has several segments; a budget is its first one's, and holds for all.

At the edge work is refused, or waits until the budget is raised (`pauses`). Steps and saves use no
tokens and are always admitted, so that a run at its edge can still be saved. On the event loop
only; the store is asked off it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tinkex.errors import ConfigError, InvalidInputError
from tinkex.server.process.problems import ApiError
from tinkex.store import BudgetScope, BudgetUnit, SpendingBudget, Store, UsageKind
from tinkex.store.usage import OPERATORS_KIND, TOKEN_KINDS

MAX_OF_USER = 200
"""Budgets that one user may set; those of administrators do not count, nor are they refused."""
MILLION = 1e6
UNITS: Mapping[BudgetUnit, str] = {
    "tokens": "tokens",
    "device_seconds": "seconds of the device",
    "money": "of the server's money",
}


class BudgetError(InvalidInputError):
    """A request that a budget has no room for. Its number is used, and it was not run."""

    # Not a 402: SDKs take that for a pause of the whole account and wait, up to an hour.
    code = "budget"


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens by kind, or by `MODEL kind` for one base model."""

    per_million: Mapping[str, float]
    model_of: Callable[[str], str] = str
    """The base model behind a name that a client may ask for: an alias, one with a context."""

    @classmethod
    def read(cls, entries: Iterable[str], model_of: Callable[[str], str] = str) -> Prices:
        """Prices from `KIND=PRICE` or `MODEL:KIND=PRICE`, of a million tokens.

        Raises:
            ConfigError: Not of that form.
        """
        prices: dict[str, float] = {}
        for entry in entries:
            name, _, text = entry.partition("=")
            model, _, kind = name.rpartition(":")
            try:
                price = float(text)
            except ValueError:
                price = math.nan
            if kind not in TOKEN_KINDS or not 0 <= price < 1e12:
                raise ConfigError(
                    f"--price {entry} is not [MODEL:]KIND=PRICE, the price of a million tokens; "
                    f"kinds are {', '.join(TOKEN_KINDS)}."
                )
            prices[f"{model} {kind}" if model else kind] = price
        return cls(prices, model_of)

    def cost(self, counts: Mapping[str, float]) -> float:
        """The price of what is counted by `MODEL kind`; what has no price costs nothing."""
        return sum(count * self._price(name) for name, count in counts.items()) / MILLION

    def _price(self, name: str) -> float:
        model, _, kind = name.rpartition(" ")
        price = self._by_model.get(f"{self.model_of(model)} {kind}")
        return self.per_million.get(kind, 0.0) if price is None else price

    @cached_property
    def _by_model(self) -> dict[str, float]:
        """Prices of base models, by the name that `model_of` gives."""
        named = ((*name.rpartition(" "), price) for name, price in self.per_million.items())
        return {f"{self.model_of(model)} {kind}": p for model, _, kind, p in named if model}


@dataclass(slots=True, eq=False)
class LiveBudget:
    """A budget with what counts against it now."""

    budget: SpendingBudget
    prices: Prices
    used: dict[str, float]
    """By `MODEL kind`, with what was used before it was set."""
    reserved: float = 0.0
    """For requests under way, in its unit."""
    is_gone: bool = False

    @property
    def spent(self) -> float:
        before = self.budget.before
        return self.measure({name: n - before.get(name, 0.0) for name, n in self.used.items()})

    def measure(self, counts: Mapping[str, float]) -> float:
        """Counts by `MODEL kind` in the unit of the budget."""
        unit = self.budget.unit
        if unit == "money":
            return self.prices.cost(counts)
        kinds = (OPERATORS_KIND,) if unit == "device_seconds" else TOKEN_KINDS
        return sum(n for name, n in counts.items() if name.rpartition(" ")[2] in kinds)

    def has_room(self, amount: float) -> bool:
        if self.is_gone:
            return True
        taken, limit = self.spent + self.reserved, self.budget.amount
        # Seconds are not known before; one token more than the limit is one too many.
        return taken < limit if self.budget.unit == "device_seconds" else taken + amount <= limit

    def why(self, amount: float) -> str:
        """Why there is no room, and the way out."""
        budget = self.budget
        parts = [f"{self.spent:,.6g} of {budget.amount:,.6g} {UNITS[budget.unit]} are spent"]
        if self.reserved:
            parts.append(f"{self.reserved:,.6g} are reserved for requests under way")
        if amount:
            parts.append(f"this request may need {amount:,.6g}")
        way_out = (
            "Ask an administrator of this server for more"
            if budget.by_admin
            else f"Raise it with `tinkex budget set {budget.scope} {budget.subject} "
            f"{budget.unit}=AMOUNT`"
        )
        whose = f"{budget.scope} {budget.subject!r}"
        return f"the budget of {whose} has no room: {', '.join(parts)}. {way_out}"


@dataclass(slots=True, eq=False)
class Reservation:
    """The part of each budget that a request may use, held until it has ended."""

    parts: list[tuple[LiveBudget, float]] = field(default_factory=list)
    is_held: bool = False

    @property
    def blocked_by(self) -> tuple[LiveBudget, float] | None:
        """A budget without room for it, if there is one."""
        if self.is_held:
            return None
        return next(((live, part) for live, part in self.parts if not live.has_room(part)), None)

    @property
    def reason(self) -> str:
        """Why the request waits, for a person; empty when no budget holds it up."""
        blocked = self.blocked_by
        return "" if blocked is None else f"paused: {blocked[0].why(blocked[1])}"


def require_own(live: LiveBudget) -> None:
    """Refuse a user what only administrators may change.

    Raises:
        ApiError: 403.
    """
    if live.budget.by_admin:
        raise ApiError(403, "An administrator set this budget; only they can change it.")


NOTHING = Reservation()
"""Of requests that no budget holds for."""


class SpendingBudgets:
    def __init__(self, store: Store, prices: Prices) -> None:
        self._store, self.prices = store, prices
        self._live: dict[tuple[BudgetScope, str], dict[BudgetUnit, LiveBudget]] = {}
        self._first_run: dict[str, str] = {}
        """The first segment of runs that have a budget, by the later ones."""
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        """Changes wait for each other: whose budget it is is asked right before."""

    async def open(self) -> None:
        """Take up the budgets of the store, with what was used meanwhile."""
        for budget in await self._store.call(self._store.budgets.all):
            used = await self.used(budget.scope, budget.subject, budget.user_id)
            await self._take(LiveBudget(budget, self.prices, used))

    # ------------------------------------------------------------------------ changing

    async def put(self, budget: SpendingBudget) -> LiveBudget:
        """Set a budget; what was used before does not count, unless one was there already.

        Raises:
            ApiError: 403 for a user's in the place of an administrator's, 409 when the user has too
                many.
        """
        async with self._writing:
            return await self._put(budget)

    async def _put(self, budget: SpendingBudget) -> LiveBudget:
        known = self.find(budget.scope, budget.subject, budget.unit)
        if known is not None and not budget.by_admin:
            require_own(known)
        own = [live for live in self.of_user(budget.user_id) if not live.budget.by_admin]
        if known is None and not budget.by_admin and len(own) >= MAX_OF_USER:
            raise ApiError(409, f"You have {MAX_OF_USER} budgets; remove one first.")
        if known is None:
            # It holds from here on, before anything waits, so that no use falls in between.
            live = LiveBudget(budget, self.prices, dict(budget.before))
            await self._take(live)
        else:
            live, live.budget = known, budget
        self._wake_all()
        await self._store.call(self._store.budgets.put, budget)
        return live

    async def remove(self, live: LiveBudget, *, by_admin: bool = True) -> None:
        """Remove a budget, unless that has happened already.

        Raises:
            ApiError: 403 for a user where an administrator has set it.
        """
        async with self._writing:
            if not by_admin:
                require_own(live)
            if not live.is_gone:  # by now another one may be in its place
                await self._remove(live)

    async def _remove(self, live: LiveBudget) -> None:
        budget = live.budget
        await self._store.call(
            self._store.budgets.remove, budget.scope, budget.subject, budget.unit
        )
        live.is_gone = True
        units = self._live.get((budget.scope, budget.subject), {})
        units.pop(budget.unit, None)
        if not units:
            self._live.pop((budget.scope, budget.subject), None)
            if budget.scope == "run":
                firsts = self._first_run.items()
                self._first_run = {run: first for run, first in firsts if first != budget.subject}
        self._wake_all()

    async def forget_run(self, run_id: str) -> None:
        """Remove the budgets of a run that is deleted."""
        for live in list(self._live.get(("run", run_id), {}).values()):
            await self.remove(live)

    async def join(self, run_id: str, first_run_id: str) -> None:
        """Let the budgets of a run hold for one more segment, with what that used so far."""
        units = self._live.get(("run", first_run_id))
        if units is None:
            return
        # It holds before the read: use that falls in between counts twice rather than never.
        self._first_run[run_id] = first_run_id
        for live in list(units.values()):
            for name, count in (await self.used("run", run_id, live.budget.user_id)).items():
                live.used[name] = live.used.get(name, 0.0) + count

    def find(self, scope: BudgetScope, subject: str, unit: BudgetUnit) -> LiveBudget | None:
        """The budget of a subject; a later segment of a run has those of the first one, too."""
        subjects = self._subjects(scope, subject)
        budgets = (self._live.get((scope, name), {}).get(unit) for name in subjects)
        return next((live for live in budgets if live is not None), None)

    async def first_of(self, scope: BudgetScope, subject: str) -> str:
        """The subject that a new budget is set on: of a run, its first segment."""
        run = await self._store.call(self._store.models.get, subject) if scope == "run" else None
        return subject if run is None else run.first_segment_id

    def of_user(self, user_id: str) -> list[LiveBudget]:
        return [
            live
            for units in self._live.values()
            for live in units.values()
            if live.budget.user_id == user_id
        ]

    async def used(self, scope: BudgetScope, subject: str, user_id: str) -> dict[str, float]:
        return await self._store.call(self._store.budgets.used, scope, subject, user_id)

    async def _take(self, live: LiveBudget) -> None:
        budget = live.budget
        self._live.setdefault((budget.scope, budget.subject), {})[budget.unit] = live
        if budget.scope == "run":
            later = await self._store.call(self._store.models.later_segments, budget.subject)
            self._first_run |= dict.fromkeys(later, budget.subject)

    def _subjects(self, scope: BudgetScope, subject: str) -> list[str]:
        first = self._first_run.get(subject) if scope == "run" else None
        return [subject] if first is None else [subject, first]

    # ------------------------------------------------------------------------ spending

    def hold_for(self, user_id: str, key_id: int | None, run_id: str | None) -> bool:
        """Whether any budget limits the work of a user with a key on a run."""
        return bool(self._live) and bool(self.holding(user_id, key_id, run_id))

    def reserve(
        self,
        user_id: str,
        key_id: int | None,
        run_id: str | None,
        counts: Mapping[str, float],
        *,
        is_admitted: bool = False,
    ) -> Reservation:
        """Room for a request that uses at most `counts`, by `MODEL kind`.

        One that `is_admitted`, before a restart, is not refused: it had room, and has a promise.

        Raises:
            BudgetError: A budget that refuses has none.
        """
        if not self._live or not counts:
            return NOTHING
        parts = [(live, live.measure(counts)) for live in self.holding(user_id, key_id, run_id)]
        for live, part in parts:
            if not is_admitted and not live.budget.pauses and not live.has_room(part):
                raise BudgetError(live.why(part))
        reservation = Reservation(parts)
        if not any(live.budget.pauses for live, _ in parts):
            self._hold(reservation)
        return reservation

    async def wait(self, reservation: Reservation) -> None:
        """Wait until a request has room in the budgets that pause, and hold it."""
        while reservation.blocked_by is not None:
            await self._changed.wait()
        self._hold(reservation)

    def release(self, reservation: Reservation) -> None:
        """A request has ended; what it used was counted."""
        if not reservation.is_held or reservation is NOTHING:
            return
        reservation.is_held = False
        for live, part in reservation.parts:
            live.reserved = max(0.0, live.reserved - part)
        self._wake_all()

    def count(
        self,
        user_id: str,
        key_id: int | None,
        run_id: str | None,
        base_model: str | None,
        counts: Mapping[UsageKind, float],
    ) -> None:
        """Note what was used, by kind."""
        if not self._live:
            return
        for live in self.holding(user_id, key_id, run_id):
            for kind, count in counts.items():
                name = f"{base_model or ''} {kind}"
                live.used[name] = live.used.get(name, 0.0) + count

    def _hold(self, reservation: Reservation) -> None:
        if reservation.is_held or reservation is NOTHING:
            return
        reservation.is_held = True
        for live, part in reservation.parts:
            live.reserved += part

    def holding(self, user_id: str, key_id: int | None, run_id: str | None) -> list[LiveBudget]:
        """The budgets that limit the work of a user with a key on a run."""
        subjects: list[tuple[BudgetScope, str]] = [("user", user_id)]
        if key_id is not None:
            subjects.append(("key", str(key_id)))
        if run_id:
            subjects += [("run", name) for name in self._subjects("run", run_id)]
        budgets = [live for subject in subjects for live in self._live.get(subject, {}).values()]
        # Others may sample from a public checkpoint of a run: that is not its owner's use.
        return [live for live in budgets if live.budget.user_id == user_id]

    def _wake_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

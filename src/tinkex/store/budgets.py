"""Budgets: how much a user, a key or a run may use in all, and what had been used before."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, func, or_, select

from tinkex.store import schema
from tinkex.store.noun import StoredNoun, row_of
from tinkex.store.records import SpendingBudget
from tinkex.store.upsert import insert_or_replace

_table, _usage, _models = schema.budgets, schema.usage, schema.models


class StoredBudgets(StoredNoun):
    def all(self) -> list[SpendingBudget]:
        return self._all(SpendingBudget, select(_table).order_by(*_table.primary_key))

    def put(self, budget: SpendingBudget) -> None:
        """Keep a budget, in the place of one of the same subject and unit."""

        def write(connection: Connection) -> None:
            connection.execute(insert_or_replace(connection, _table), row_of(budget))

        self._writer.run(write)

    def remove(self, scope: str, subject: str, unit: str) -> None:
        names = {"scope": scope, "subject": subject, "unit": unit}
        self._write(
            delete(_table).where(*(_table.c[name] == value for name, value in names.items()))
        )

    def used(self, scope: str, subject: str, user_id: str) -> dict[str, float]:
        """The use of a subject since the server exists, by `MODEL kind`. Everything counts so far.

        By base model, because a model may have a price of its own. A run is all its segments, when
        the subject is the first one.
        """
        self._writer.flush()
        where: list[Any] = [_usage.c.user_id == user_id]
        if scope == "key":
            where.append(_usage.c.key_id == int(subject))
        elif scope == "run":
            later = select(_models.c.model_id).where(_models.c.first_run_id == subject)
            where.append(or_(_usage.c.model_id == subject, _usage.c.model_id.in_(later)))
        names = _usage.c.base_model, _usage.c.kind
        query = select(*names, func.sum(_usage.c.count)).where(*where).group_by(*names)
        return {f"{model} {kind}": float(count) for model, kind, count in self._rows(query)}

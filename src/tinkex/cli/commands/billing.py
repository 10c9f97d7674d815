"""`tinkex billing ...`: tokens and stored checkpoints, as the server counted them."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tinkex.cli.output import Table, plain
from tinkex.cli.state import Noun, State, pass_state

_CSV = click.Path(dir_okay=False, allow_dash=True, path_type=str)


@click.group(cls=Noun)
def billing() -> None:
    """Tokens used and checkpoint storage."""


@billing.command()
@click.argument("start")
@click.argument("end")
@click.option("--csv", "csv_path", type=_CSV, help="Write the events there; - is stdout.")
@click.option("--sessions-csv", type=_CSV, help="Write the sessions there; - is stdout.")
@pass_state
def usage(
    state: State, start: str, end: str, csv_path: str | None, sessions_csv: str | None
) -> None:
    """Usage from START to END: whole hours, RFC 3339, at most 14 days apart."""
    with state.admin() as admin:
        answer = admin.get_billing_usage(start, end).result()
    rows = [_flat(plain(event, rfc3339=True)) for event in answer.data]
    if csv_path:
        _write_csv(csv_path, rows)
    if sessions_csv:
        sessions = plain(answer.sessions, rfc3339=True)
        _write_csv(
            sessions_csv, [{"session_id": key, **_flat(value)} for key, value in sessions.items()]
        )
    if "-" in (csv_path, sessions_csv):
        return
    state.show(lambda: _table("Usage", rows), plain(answer, rfc3339=True))


@billing.command("checkpoint-storage", help="What is stored now, per owner.")
@click.option("--project-id", help="Only this project.")
@click.option("--csv", "csv_path", type=_CSV, help="Write the rows there; - is stdout.")
@pass_state
def checkpoint_storage(state: State, project_id: str | None, csv_path: str | None) -> None:
    """Stored checkpoints by owner."""
    with state.admin() as admin:
        answer = admin.get_current_checkpoint_storage_usage(project_id).result()
    rate = answer.effective_rate_usd_per_gigabyte_month
    rows = [
        {"effective_rate_usd_per_gigabyte_month": rate, **plain(item, rfc3339=True)}
        for item in answer.data
    ]
    if csv_path:
        _write_csv(csv_path, rows)
    if csv_path == "-":
        return
    state.show(lambda: _table("Checkpoint storage", rows), plain(answer, rfc3339=True))


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """`{"event_info": {"type": "training"}}` -> `{"event_info.type": "training"}`."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in _flat(value).items()}
        else:
            flat[key] = value
    return flat


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    # Columns that no row fills would only push the others off the screen.
    columns = [key for key in _columns(rows) if any(row.get(key) is not None for row in rows)]
    return Table(
        title=f"{title} ({len(rows)})",
        columns=columns,
        rows=[[_cell(key, row) for key in columns] for row in rows],
    )


def _cell(key: str, row: dict[str, Any]) -> Any:
    if key not in row:
        return ""
    return "null" if row[key] is None and "cost" in key else row[key]


def _write_csv(path: str, rows: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=_columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if path == "-":
        sys.stdout.write(text.getvalue())
    else:
        Path(path).write_text(text.getvalue(), encoding="utf-8")

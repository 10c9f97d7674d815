"""Settings of several runs side by side: what differs, what is equal, and what nobody knows.

A run that did not tell its settings is compared in what the server knows by itself, the base model
and the adapter, and in nothing else: an absent setting is unknown there, not equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"
NOT_SET = "–"
MAX_VALUE = 300


@dataclass(frozen=True, slots=True)
class SettingCell:
    text: str
    is_known: bool
    is_odd: bool = False
    """Other than what it is compared with: the baseline, or else most of the runs."""


@dataclass(frozen=True, slots=True)
class ComparedSetting:
    name: str
    cells: list[SettingCell]

    @property
    def differs(self) -> bool:
        return len({cell.text for cell in self.cells if cell.is_known}) > 1

    @property
    def is_known(self) -> bool:
        return all(cell.is_known for cell in self.cells)


@dataclass(frozen=True, slots=True)
class SettingsView:
    rows: list[ComparedSetting]
    silent: list[str]
    """Names of runs that told no settings of their own."""

    @property
    def differing(self) -> list[ComparedSetting]:
        return [row for row in self.rows if row.differs]

    @property
    def equal(self) -> list[ComparedSetting]:
        return [row for row in self.rows if not row.differs and row.is_known]

    @property
    def unknown(self) -> list[ComparedSetting]:
        """Settings that some run has and of which another says nothing."""
        return [row for row in self.rows if not row.differs and not row.is_known]


def settings_view(runs: Sequence[dict[str, Any]], baseline: str = "") -> SettingsView:
    """`runs` as a `Source` tells them."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    number = next((i for i, run in enumerate(runs) if run["run_id"] == baseline), None)
    rows = [ComparedSetting(name, _cells(runs, name, number)) for name in sorted(names)]
    silent = [run["name"] for run in runs if not run["tells_settings"]]
    return SettingsView(rows, silent)


def _cells(runs: Sequence[dict[str, Any]], name: str, baseline: int | None) -> list[SettingCell]:
    texts = [_text(run, name) for run in runs]
    known = [text for text in texts if text != UNKNOWN]
    if baseline is not None:
        usual = texts[baseline]
    else:
        usual = max(known, key=known.count, default="")
        if known.count(usual) < 2:  # all are different: none is the odd one
            return [SettingCell(text, text != UNKNOWN) for text in texts]
    return [SettingCell(text, text != UNKNOWN, text not in (usual, UNKNOWN)) for text in texts]


def _text(run: dict[str, Any], name: str) -> str:
    if name in run["settings"]:
        return shown(run["settings"][name])
    return NOT_SET if run["tells_settings"] else UNKNOWN


def sort_runs(
    runs: Sequence[dict[str, Any]], name: str, *, down: bool = False
) -> list[dict[str, Any]]:
    """By a setting: numbers by size, then texts, then runs that do not have it, either way."""

    def key(run: dict[str, Any]) -> tuple[int, float, str]:
        value = run["settings"].get(name)
        if isinstance(value, int | float):
            return 0, float(value), ""
        return 1, 0.0, shown(value).casefold()

    has = [run for run in runs if run["settings"].get(name) is not None]
    others = [run for run in runs if run["settings"].get(name) is None]
    return [*sorted(has, key=key, reverse=down), *others]


def shown(value: Any) -> str:
    """A setting as people write it."""
    if value is None or value == "":
        return NOT_SET
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(shown(one) for one in value)[:MAX_VALUE] or NOT_SET
    return str(value)[:MAX_VALUE]


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted names."""
    for name, inner in sorted(value.items()):
        if isinstance(inner, dict) and inner and prefix.count(".") < 6:
            yield from flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner

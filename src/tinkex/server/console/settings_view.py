"""Settings of several runs side by side: what differs, what is equal, and what nobody knows.

A run that did not tell its settings is compared in what the server knows by itself, the base model
and the adapter, and in nothing else: an absent setting is unknown there, not equal. Values are
compared, never the texts shown for them: those are rounded and shortened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = "unknown"
NOT_SET = "–"
MAX_VALUE = 300
OF_SERVERS = ("base_model", "sdk_version", "lora.", "optimizer.", "metadata.")
"""How names begin of settings that a server knows by itself and a folder does not have."""


@dataclass(frozen=True, slots=True)
class SettingCell:
    text: str
    is_known: bool
    is_odd: bool = False
    """Other than what it is compared with: the baseline, or else most of the runs."""
    whole: str = ""
    """The value at full length, by which cells are compared."""


@dataclass(frozen=True, slots=True)
class ComparedSetting:
    name: str
    cells: list[SettingCell]

    @property
    def differs(self) -> bool:
        return len({cell.whole for cell in self.cells if cell.is_known}) > 1

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
    known = [_is_known(run, name) for run in runs]
    values = [run["settings"].get(name) for run in runs]
    wholes = [_whole(value) for value in values]
    told = [whole for whole, is_known in zip(wholes, known, strict=True) if is_known]
    usual: str | None = max(told, key=told.count, default="")
    if baseline is not None:
        usual = wholes[baseline] if known[baseline] else None
    elif told.count(str(usual)) < 2:  # all are different: none is the odd one
        usual = None
    return [
        SettingCell(text, True, usual is not None and whole != usual, whole)
        if is_known
        else SettingCell(UNKNOWN, False)
        for text, whole, is_known in zip(_texts(values, wholes), wholes, known, strict=True)
    ]


def _is_known(run: dict[str, Any], name: str) -> bool:
    """Whether a run has a setting, or told its settings and this one is not among them."""
    if name in run["settings"]:
        return True
    return run["tells_settings"] and not ("folder" in run and name.startswith(OF_SERVERS))


def _texts(values: Sequence[Any], wholes: Sequence[str]) -> list[str]:
    """Values as they are shown; those that would look the same and differ, from where they do."""
    texts = [shown(value) for value in values]
    if len(set(texts)) == len(set(wholes)):
        return texts
    start = max(len(os.path.commonprefix([one for one in wholes if one != NOT_SET])) - 40, 0)
    return [
        whole if whole == NOT_SET else ("… " if start else "") + whole[start : start + MAX_VALUE]
        for whole in wholes
    ]


def _whole(value: Any) -> str:
    """A value at full length; 1 and 1.0 are one, and so are nothing and an empty text."""
    if value is None or value == "":
        return NOT_SET
    if isinstance(value, bool):
        return shown(value)
    if isinstance(value, int | float):
        return repr(int(value)) if value == value // 1 else repr(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_whole, value)) or NOT_SET
    return str(value)


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

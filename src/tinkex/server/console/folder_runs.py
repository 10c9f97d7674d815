"""Runs in folders of this disk: ours and those of tinker-cookbook.

A folder with a `metrics.jsonl` is a run. Files are read from where the last look ended, so that a
page of a long run costs what was added to it; a file that became shorter is read again. What was
found is bounded, because a folder may be anybody's: depth, number of runs, curves, length of lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tinkex.contract.run_folder import (
    CHECKPOINTS_FILE,
    COMMAND_FILE,
    CONFIG_FILE,
    FINISHED_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
)
from tinkex.server.console.colors import color_of
from tinkex.server.console.settings_view import flat
from tinkex.server.console.source import Query, Source, age, copied, number_in, resume
from tinkex.server.console.sparks import spark
from tinkex.server.process.problems import ApiError
from tinkex.server.runs.curves import MAX_CURVES, Curve, most_points
from tinkex.store import User
from tinkex.types.fields.bounds import storable

MAX_DEPTH = 4
MAX_RUNS = 10_000
MAX_LINE = 4_000_000
MAX_ANSWERS = 32_000_000
"""Bytes of the answers of one step that are read."""
MAX_STEPS = 100_000
MAX_OPEN = 256
"""Runs whose curves are kept in memory."""
LOOK_S = 2.0
FRESH_S = 60.0
"""A run whose file grew this lately is called running."""
LATE = 3
"""Where steps take longer: until the next is so many times as late as the last ones were."""
LONGEST_STEP_S = 3600.0
NUM_TIMED = 10
"""The last steps whose time is looked at, and the bytes of a file's end that have them."""
MAX_TAIL = 64 * 1024
# What the list shows: of RL the reward, since its loss is near zero; the names of tinker-cookbook.
_SHOWN = ("reward", "env/all/reward/total", "loss", "train_mean_nll", "test/nll")
_REASONS = {
    "running": "",
    "stopped": "ended before its last step",
    "finished": "",
}
_ID = re.compile(r"[0-9a-f]{16}")
_HALVES = re.compile(rb"\\u[dD]|\xed")
"""Bytes without which JSON holds no half of a character, which nothing can be written with."""
_MODELS = ("model", "model_name", "base_model")
_TOKENS = ("num_tokens", "tokens", "num_loss_tokens")


@dataclass(slots=True)
class Lines:
    """The lines of a file that grows."""

    file: Path
    offset: int = 0

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Objects that were added since the last look, each with its offset in the file."""
        with self.file.open("rb") as source:
            source.seek(self.offset)
            while line := source.readline(MAX_LINE):
                if not line.endswith(b"\n"):
                    if len(line) < MAX_LINE:
                        return  # being written
                    self.offset += len(line)
                    continue  # far too long; its end is no object either
                at, self.offset = self.offset, self.offset + len(line)
                if (found := _object(line)) is not None:
                    yield at, found

    @property
    def was_cut(self) -> bool:
        return self.file.stat().st_size < self.offset


@dataclass(slots=True)
class NotFinite:
    """How often a metric was NaN or infinite, and at which step last."""

    count: int = 0
    last_step: float = 0


@dataclass(slots=True)
class Folder:
    path: Path
    metrics: Lines
    rollouts: Lines
    curves: dict[str, Curve] = field(default_factory=dict)
    offsets: dict[int, list[int]] = field(default_factory=dict)
    """Where in the rollouts each step's answers stand."""
    num_lines: int = 0
    last_step: float = 0
    clock: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    """Metrics that were NaN or infinite, which no curve can show."""
    _shown: dict[str, Curve] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> Folder:
        return cls(path, Lines(path / METRICS_FILE), Lines(path / ROLLOUTS_FILE))

    def look(self) -> dict[str, Curve]:
        """Read what was added; gives curves that no later look changes. Blocks."""
        with self.lock:
            before = self.metrics.offset
            if self.metrics.was_cut:
                self.metrics.offset, self.num_lines, self.clock = 0, 0, 0.0
                self.curves.clear()
                self.not_finite.clear()
            for _, line in self.metrics.new():
                self._take(line)
            if self.metrics.offset != before:
                self._shown = {name: copied(curve) for name, curve in self.curves.items()}
            return self._shown

    def _take(self, line: dict[str, Any]) -> None:
        step = number_in(line.get("step", line.get("progress/batch")))
        self.last_step = step if step is not None else self.num_lines
        self.num_lines += 1
        at = number_in(line.get("time"))
        self.clock = (
            at if at is not None else self.clock + (number_in(line.get("time/total")) or 1.0)
        )
        for given, value in line.items():
            name, number = given[:100], number_in(value)
            if given in ("step", "time"):
                continue
            if number is None:
                self._count_not_finite(name, value)
                continue
            if name in self.curves or len(self.curves) < MAX_CURVES:
                curve = self.curves.setdefault(name, Curve())
                limit = most_points(len(self.curves))
                curve.add(self.last_step, number, self.clock, limit=limit)

    def _count_not_finite(self, name: str, value: object) -> None:
        if not isinstance(value, float) or math.isfinite(value):
            return
        if name in self.not_finite or len(self.not_finite) < MAX_CURVES:
            counted = self.not_finite.setdefault(name, NotFinite())
            counted.count, counted.last_step = counted.count + 1, self.last_step

    def last_of(self, name: str) -> float | None:
        """The last value of a metric, NaN where it was not finite. Blocks."""
        curve, counted = self.look().get(name), self.not_finite.get(name)
        if counted and (curve is None or not curve.steps or counted.last_step > curve.steps[-1]):
            return math.nan
        return curve.values[-1] if curve and curve.values else None

    def rollout_steps(self) -> list[int]:
        """The steps of which there are answers. Blocks."""
        if not self.rollouts.file.is_file():
            return []
        with self.lock:
            if self.rollouts.was_cut:
                self.rollouts.offset = 0
                self.offsets.clear()
            for at, line in self.rollouts.new():
                step = number_in(line.get("step"))
                if step is not None and (step in self.offsets or len(self.offsets) < MAX_STEPS):
                    self.offsets.setdefault(int(step), []).append(at)
            return sorted(self.offsets)

    def answers(self, step: int, limit: int = 1024) -> list[dict[str, Any]]:
        if step not in self.rollout_steps():
            return []
        found: list[dict[str, Any]] = []
        num_bytes = 0
        with self.rollouts.file.open("rb") as source:
            for at in self.offsets[step][:limit]:
                source.seek(at)
                line = source.readline(MAX_LINE)
                num_bytes += len(line)
                if num_bytes > MAX_ANSWERS:
                    break
                if (one := _object(line)) is not None:
                    found.append(one)
        return found


class FolderRuns(Source):
    """All runs under one folder, for the pages, and those that have a name elsewhere."""

    is_local = True

    def __init__(self, root: Path, named: Callable[[], Mapping[str, Path]] = dict) -> None:
        self._root = root
        self._named = named
        self._names: dict[Path, str] = {}
        self._found: dict[str, Path] = {}
        self._looked_at = -math.inf
        self._open: OrderedDict[str, Folder] = OrderedDict()
        self._models: dict[Path, tuple[float, str]] = {}

    async def page(self, user: User, query: Query) -> dict[str, Any]:
        return await asyncio.to_thread(self._page, query)

    def _page(self, query: Query) -> dict[str, Any]:
        self._look()
        models = {run_id: self._model_of(path) for run_id, path in self._found.items()}
        chosen = [
            (run_id, path, moment)
            for run_id, path in self._found.items()
            if (moment := _written_at(path / METRICS_FILE)) is not None
            and self._fits(query, path, models[run_id], moment)
        ]
        chosen.sort(key=lambda one: one[2], reverse=query.sort != "oldest")
        total = len(chosen)
        size = query.page_size
        shown = chosen[query.page * size : (query.page + 1) * size]
        return {
            "runs": [row for run_id, _, _ in shown if (row := self._row_of(run_id, query))],
            "total": total,
            "pages": (total + size - 1) // size,
            "models": sorted({model for model in models.values() if model})[:200],
            "projects": [],
        }

    def _fits(self, query: Query, path: Path, model: str, moment: float) -> bool:
        """Whether a folder is among the runs asked for; it has no tags and is in no project."""
        searched = f"{self._name(path)} {model}".lower()
        return (
            query.search.lower() in searched
            and query.model in ("", model)
            and query.status in ("", _status(path, moment))
            and not query.tag
            and not query.project
        )

    def _model_of(self, path: Path) -> str:
        """The base model of a folder; its config is read again only when it was written again."""
        moment = _written_at(path / CONFIG_FILE)
        if moment is None:
            return ""
        known = self._models.get(path)
        if known is None or known[0] != moment:
            known = moment, str(_first(_json_file(path / CONFIG_FILE), _MODELS))[:200]
            self._models[path] = known
        return known[1]

    def _row_of(self, run_id: str, query: Query) -> dict[str, Any] | None:
        """The row of a run; None for one that went since, or that we may not read."""
        try:
            return self._row(run_id, query)
        except (OSError, ApiError):
            return None

    def _row(self, run_id: str, query: Query) -> dict[str, Any]:
        folder = self._folder(run_id)
        curves = folder.look()
        name = next((one for one in _SHOWN if one in curves or one in folder.not_finite), None)
        values = curves[name].values if name and name in curves else []
        tokens = next((curves[n] for n in _TOKENS if n in curves), None)
        return {
            **self._head(run_id, folder),
            **(_settings(folder) if query.view == "settings" else {}),
            "steps": folder.num_lines,
            "metric": name,
            "last": folder.last_of(name) if name else None,
            "tokens": int(sum(tokens.values) * tokens.stride) if tokens else 0,
            "spark": spark(values),
        }

    def _head(self, run_id: str, folder: Folder) -> dict[str, Any]:
        config = _json_file(folder.path / CONFIG_FILE)
        written = (folder.path / METRICS_FILE).stat().st_mtime
        status = _status(folder.path, written)
        return {
            "run_id": run_id,
            "name": self._name(folder.path),
            "own_name": "",
            "tags": [],
            "note": "",
            "project": "",
            "owner": "",
            "color": color_of(run_id),
            "base_model": _first(config, _MODELS),
            "rank": _first(config, ("rank", "lora_rank")),
            "folder": _text(folder.path),
            "created_at": written,
            "age": age(written),
            "status": status,
            "why": _REASONS[status],
        }

    def _name(self, path: Path) -> str:
        if path == self._root:
            return _text(Path(path.name))
        return self._names.get(path) or _text(path.relative_to(self._root))

    async def run(self, user: User | None, run_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._run, run_id)

    def _run(self, run_id: str) -> dict[str, Any]:
        folder = self._folder(run_id)
        file = folder.path / CHECKPOINTS_FILE
        saved = [line for _, line in Lines(file).new()] if file.is_file() else []
        paths = [line for line in saved if isinstance(line.get("state_path"), str)]
        folder.look()
        return {
            "not_finite": {name: asdict(one) for name, one in folder.not_finite.items()},
            **self._head(run_id, folder),
            **_settings(folder),
            "segments": [],
            "checkpoints": [
                _checkpoint(line[field], line.get("step"))
                for line in paths[-50:]
                for field in ("state_path", "sampler_path")
                if isinstance(line.get(field), str)
            ],
            "resume": resume(paths[-1]["state_path"]) if paths else "",
        }

    def has(self, run_id: str) -> bool:
        """Whether it is a run of these; no folder is looked at for what cannot be one. Blocks."""
        if run_id not in self._found and _ID.fullmatch(run_id):
            self._look()
        return run_id in self._found

    async def check(self, user: User | None, run_id: str) -> None:
        await asyncio.to_thread(self._folder, run_id)

    async def curves(self, run_id: str) -> dict[str, Curve]:
        return await asyncio.to_thread(lambda: self._folder(run_id).look())

    async def rollout_steps(self, run_id: str) -> list[int]:
        return await asyncio.to_thread(lambda: self._folder(run_id).rollout_steps())

    async def rollouts(self, run_id: str, step: int) -> list[dict[str, Any]]:
        return await asyncio.to_thread(lambda: self._folder(run_id).answers(step))

    # ------------------------------------------------------------------------ finding

    def _look(self) -> None:
        """Find the runs again, if the last look is old. Blocks."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        found: dict[str, Path] = {}
        for folder, folders, files in os.walk(self._root):
            path = Path(folder)
            # A file: a link to nowhere has a name too, and a pipe would be waited for.
            if METRICS_FILE in files and (path / METRICS_FILE).is_file():
                found[self._id(path)] = path
            if len(path.relative_to(self._root).parts) >= MAX_DEPTH:
                folders.clear()
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if len(found) >= MAX_RUNS:
                break
        names = {
            path: name for name, path in self._named().items() if (path / METRICS_FILE).is_file()
        }
        self._names = names
        self._found = {**found, **{self._id(path): path for path in names}}

    def _id(self, path: Path) -> str:
        inside = path.relative_to(self._root) if path.is_relative_to(self._root) else path
        return hashlib.blake2b(os.fsencode(inside), digest_size=8).hexdigest()

    def _folder(self, run_id: str) -> Folder:
        if run_id not in self._found:
            self._look()
        path = self._found.get(run_id)
        if path is None or not (path / METRICS_FILE).is_file():
            raise ApiError(404, f"No run {run_id[:80]!r} in {self._root}.")
        folder = self._open.setdefault(run_id, Folder.at(path))
        self._open.move_to_end(run_id)
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return folder


def _settings(folder: Folder) -> dict[str, Any]:
    settings = dict(flat(_json_file(folder.path / CONFIG_FILE)))
    return {"settings": settings, "tells_settings": bool(settings)}


def _status(path: Path, written_at: float) -> str:
    """In the words of a server's runs. Only folders of `tinkex train` say whether they ended."""
    if (_written_at(path / FINISHED_FILE) or 0.0) >= written_at:
        return "finished"
    silent_s = time.time() - written_at
    if silent_s < FRESH_S or (
        silent_s < LATE * LONGEST_STEP_S and silent_s < LATE * _step_s(path / METRICS_FILE)
    ):
        return "running"
    return "stopped" if (path / COMMAND_FILE).is_file() else "finished"


def _step_s(file: Path) -> float:
    """How long the longest of a run's last steps took, by the times in its file; 0 if unknown."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - MAX_TAIL))
            lines = map(_object, source.read().splitlines()[-NUM_TIMED:])
    except OSError:
        return 0.0
    times = [at for line in lines if line and (at := number_in(line.get("time"))) is not None]
    return min(max((b - a for a, b in pairwise(times)), default=0.0), LONGEST_STEP_S)


def _checkpoint(path: str, step: Any) -> dict[str, Any]:
    """As a server tells its own; a file knows no size, no readers and no end."""
    _, _, rest = path.removeprefix("tinker://").partition("/")
    kind, _, name = rest.partition("/")
    return {
        "path": path,
        "kind": kind,
        "name": name or path,
        "step": number_in(step),
        "size_bytes": None,
        "public": False,
        "age": "",
        "expires_at": None,
        "expires": "",
    }


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            return None
        return storable(found) if _HALVES.search(line) else found
    except (ValueError, RecursionError):
        return None


def _text(path: Path) -> str:
    """A path as a page can show it: a name on a disk is bytes, and need not be text."""
    return os.fsencode(path).decode("utf-8", "replace")


def _written_at(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def _json_file(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file() or file.stat().st_size > MAX_LINE:
            return {}
        return _object(file.read_bytes()) or {}
    except OSError:
        return {}


def _first(config: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The first setting of such a name, wherever in the config it stands."""
    settings = {key.rpartition(".")[2]: value for key, value in flat(config)}
    return next((settings[name] for name in names if settings.get(name) is not None), "")

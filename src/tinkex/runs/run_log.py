"""The folder of one training run: what was asked, what happened, and where to go on.

`config.json` holds the settings, `metrics.jsonl` a line per step, `checkpoints.jsonl` a line per
saved state, `server.json` which server has them, `finished.json` how it ended. A run that finds its
own folder resumes from the last saved state and repeats the interrupted run exactly: later metrics
lines are cut, and every batch and every seed depends only on the config and the step. A folder of
other settings is refused, naming the differences. Knows files; nothing of models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tinkex.contract.run_folder import (
    CHECKPOINTS_FILE,
    CONFIG_FILE,
    FINISHED_FILE,
    METRICS_FILE,
    SERVER_FILE,
)
from tinkex.errors import ConfigError
from tinkex.runs import json_lines
from tinkex.wire.local_servers import private_data_folder

__all__ = ["RunLog", "SavedStep", "Tracker", "make_trackers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStep:
    """A saved state: `step` steps are in it."""

    step: int
    state_path: str
    sampler_path: str | None = None


class Tracker(Protocol):
    """Anything that wants the metrics too, such as wandb."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """The folder of one run. Open it with `RunLog(folder, config)`; the same config resumes."""

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        *,
        may_change: frozenset[str] = frozenset(),
        trackers: tuple[Tracker, ...] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        may_change: Settings that a resumed run may give anew, such as its length.
        defaults: What settings were that the folder of an earlier release does not name.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._trackers = trackers
        self._defaults = json.loads(json.dumps(dict(defaults or {})))
        self._check_config(dict(config), may_change)
        self.last = self._read_last()
        self.end = self._read_end()
        """How the run ended, when it did so with these very settings; None: there is more to do."""
        if self.end is None:
            start = self.last.step if self.last else 0
            json_lines.keep(self.metrics_file, lambda line: line["step"] < start)

    @property
    def metrics_file(self) -> Path:
        return self.folder / METRICS_FILE

    @property
    def checkpoints_file(self) -> Path:
        return self.folder / CHECKPOINTS_FILE

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        json_lines.append(
            self.metrics_file, {"step": step, "time": round(time.time(), 3), **values}
        )
        for tracker in self._trackers:
            tracker.log(step, values)

    def follow(self, tracker: Tracker) -> None:
        """Send metrics there too, from now on."""
        self._trackers = (*self._trackers, tracker)

    def at_server(self, address: str) -> None:
        """Note which server trains the run: its base URL, or `local` for the private one."""
        facts: dict[str, str] = {"server": address}
        if address == "local":
            facts["data_dir"] = str(private_data_folder())
        json_lines.write_whole(self.folder / SERVER_FILE, [json.dumps(facts, indent=2), "\n"])

    def saved(self, saved: SavedStep) -> None:
        json_lines.append(self.checkpoints_file, asdict(saved))
        self.last = saved

    def ended(self, end: Mapping[str, Any]) -> None:
        """Note that nothing is left to do, so that the same call again does nothing."""
        record = {"config": self._config, "end": dict(end)}
        json_lines.write_whole(self.folder / FINISHED_FILE, [json.dumps(record, indent=2), "\n"])

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(json_lines.read(self.metrics_file))

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _check_config(self, config: dict[str, Any], may_change: frozenset[str]) -> None:
        file = self.folder / CONFIG_FILE
        self._config = json.loads(json.dumps(config))
        # A run that failed before its first step left nothing that other settings could spoil.
        if file.exists() and (self.metrics_file.exists() or self.checkpoints_file.exists()):
            before = {**self._defaults, **json.loads(file.read_text(encoding="utf-8"))}
            wanted = self._config
            changed = sorted(
                name
                for name in {*before, *wanted} - may_change - {"log_dir"}
                if before.get(name) != wanted.get(name)
            )
            if changed:
                differences = "; ".join(
                    f"{name}={before.get(name)!r}, now {wanted.get(name)!r}" for name in changed
                )
                raise ConfigError(
                    f"{self.folder} holds a run with other settings: {differences}. To go on with "
                    f"that run as it was, `tinkex train resume {self.folder}`; to train anew, name "
                    "another log folder."
                )
        json_lines.write_whole(file, [json.dumps(config, indent=2), "\n"])

    def _read_last(self) -> SavedStep | None:
        saved = list(json_lines.read(self.checkpoints_file))
        if not saved:
            return None
        fields = {name: saved[-1].get(name) for name in ("step", "state_path", "sampler_path")}
        return SavedStep(**fields)  # type: ignore[arg-type]

    def _read_end(self) -> dict[str, Any] | None:
        try:
            record = json.loads((self.folder / FINISHED_FILE).read_text(encoding="utf-8"))
            end: dict[str, Any] = record["end"]
            is_same = {**self._defaults, **record["config"]} == self._config
            is_last = self.last is not None and end["step"] == self.last.step
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return end if is_same and is_last else None


# ------------------------------------------------------------------------------ trackers


class _Wandb:
    """wandb and trackio share one interface."""

    def __init__(self, module: Any, name: str, config: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project="tinkex", name=name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def make_trackers(
    names: tuple[str, ...], folder: str | Path, config: Mapping[str, Any]
) -> tuple[Tracker, ...]:
    """The optional trackers by name: wandb, trackio, tensorboard."""
    return tuple(_tracker(name, Path(folder), config) for name in names)


def _tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    from importlib import import_module

    try:
        if name == "tensorboard":
            module = import_module("torch.utils.tensorboard")
            return _TensorBoard(module.SummaryWriter(log_dir=str(folder / "tensorboard")))
        if name in ("wandb", "trackio"):
            return _Wandb(import_module(name), folder.name, config)
    except ImportError as exc:
        raise ConfigError(f"{name} is not installed. Run: pip install {name}") from exc
    raise ConfigError(f"No tracker '{name}'; choose from wandb, trackio, tensorboard.")

"""The skeleton of all recipes: start or resume, order of rows, evaluate, save, stop.

Everything random depends on the seed and the step alone, so that a resumed run sees what the
undisturbed one would have seen. The loops themselves stay in their own files, in the open: a `Run`
gives them the steps that are left, and they report each.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkex import AdamParams
from tinkex.errors import APIStatusError, ConfigError, RequestFailedError
from tinkex.recipes.batches import Rows, usable
from tinkex.recipes.best import Watch
from tinkex.recipes.data import split_off
from tinkex.recipes.hooks import Hooks, OnNote
from tinkex.recipes.learning_rate import get_lr, learning_rate_at
from tinkex.recipes.options import RunOptions
from tinkex.recipes.render import Renderer
from tinkex.recipes.server_tracker import ServerTracker
from tinkex.runs.plots import Panel, plot
from tinkex.runs.run_log import RunLog, SavedStep, make_trackers
from tinkex.types.account.checkpoints import is_tinker_path

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient, TrainingClient
    from tinkex.types import OptimStepResponse

T = TypeVar("T")
R = TypeVar("R")
Evaluate = Callable[[int], dict[str, float]]
"""Measures the weights after so many steps on what is not trained on; gives metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run ended, and where its weights are."""

    step: int
    state_path: str
    """Weights and optimizer: train on from here."""
    sampler_path: str
    """Weights only: sample from here, or export."""
    interrupted: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of every metric."""
    best_step: int | None = None
    """When the held-out metric was best; None where nothing was held out."""
    best_path: str = ""
    """Weights of that step, where they were kept (`keep_best` or `patience`): sample from here."""


def open_log(config: RunOptions, *, may_change: Collection[str] = ()) -> RunLog:
    """The run's folder and trackers. Settings of a started run may differ only in `may_change`."""
    settings = asdict(config)
    trackers = make_trackers(config.trackers, config.log_dir, settings)
    # Settings that are younger than a run's folder: it was made with their defaults.
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    return RunLog(
        config.log_dir,
        settings,
        may_change=frozenset(may_change),
        trackers=trackers,
        defaults=defaults,
    )


def begin(
    service: ServiceClient,
    config: RunOptions,
    hooks: Hooks,
    *,
    may_change: Collection[str] = (),
    **told: str,
) -> Run | Result:
    """Start or resume the run of a folder; the result of one that has nothing left to do.

    Args:
        may_change: Settings that may differ from those of the run that is resumed.
        told: What the server is told beside the settings.
    """
    log = open_log(config, may_change=may_change)
    ended = finished(service, log, hooks.on_note)
    return Run(service, log, config, hooks, **told) if ended is None else ended


def _open_training(
    service: ServiceClient, log: RunLog, config: RunOptions
) -> tuple[TrainingClient, int]:
    """A fresh LoRA on the model, or the run's last saved state with its optimizer; and the step.

    A model that is a checkpoint (`tinker://...`) is trained on, with a fresh optimizer.
    """
    name = log.folder.resolve().name.strip()[:200] or None  # as trackers call it, at first
    if log.last is None and is_tinker_path(config.model):
        return service.create_training_client_from_state(config.model, name=name), 0
    if log.last is None:
        return service.create_lora_training_client(
            base_model=config.model, rank=config.rank, seed=config.seed, name=name
        ), 0
    step = log.last.step
    try:
        training = service.create_training_client_from_state_with_optimizer(
            log.last.state_path, continues_at=step
        ).result()
    except (APIStatusError, RequestFailedError) as exc:
        if _is_gone(exc):
            raise _elsewhere(log.folder, log.last.state_path) from exc
        raise
    return training, step


def _is_gone(exc: APIStatusError | RequestFailedError) -> bool:
    """Whether a server has no such checkpoint; other refusals speak for themselves."""
    return exc.status_code == 404 or "No checkpoint" in str(exc)


def _elsewhere(folder: Path, path: str) -> ConfigError:
    return ConfigError(
        f"{folder} holds a run whose checkpoint {path} this server does not have: it was deleted, "
        "or is on another server. Use the server it ran on, or start over in another log folder "
        "(quickstart: --fresh)."
    )


def finished(service: ServiceClient, log: RunLog, on_note: OnNote) -> Result | None:
    """The result of a run that has nothing left to do; None: train.

    Ask before a `Run`, which makes one on the server.

    Raises:
        ConfigError: The run's checkpoint is not on this server.
    """
    if log.end is None:
        return None
    result = Result(**log.end)
    check_here(service, log.folder, result.sampler_path)
    note_if_finished(on_note, log, result.step, result.step)
    log.close()
    return result


def check_here(service: ServiceClient, folder: Path, path: str) -> None:
    """Refuse to go on with the run of a folder whose checkpoint another server has.

    Raises:
        ConfigError: The checkpoint is not on this server.
    """
    try:
        service.create_rest_client().get_weights_info_by_tinker_path(path).result()
    except (APIStatusError, RequestFailedError) as exc:
        if _is_gone(exc):
            raise _elsewhere(folder, path) from exc
        raise


def sampler_of(service: ServiceClient, model: str) -> SamplingClient:
    """A sampler of a base model, or of the checkpoint whose path `model` is."""
    if is_tinker_path(model):
        return service.create_sampling_client(model_path=model)
    return service.create_sampling_client(base_model=model)


class Run:
    """A run under way: the client that trains it, its log, and how far it has come.

    The skeleton of every recipe: steps in order, evaluations between them, a checkpoint now and
    then, Ctrl-C, the end. A recipe says what a step and an evaluation are.

        with run.steps(num_steps, evaluate) as steps:
            for step in steps:
                ...  # forward_backward, optim_step(run.optimizer(step))
                run.report(step, metrics, num_tokens)
        return run.result(PICTURE)
    """

    def __init__(
        self,
        service: ServiceClient,
        log: RunLog,
        config: RunOptions,
        hooks: Hooks,
        **told: str,
    ) -> None:
        self._config, self.log, self._hooks = config, log, hooks
        if not is_tinker_path(config.model):
            self._peak = self._peak_of(config.model)  # refused before a run is made
        self.training, self.start = _open_training(service, log, config)
        if is_tinker_path(config.model):
            self._peak = self._peak_of(self.training.get_info().model_data.model_name or "")
        log.at_server(service.get_server_address())
        if self.start:
            self._hooks.on_note(f"Resuming from step {self.start}.")
        # The server's console shows its settings and draws its metrics, too.
        log.follow(ServerTracker(self.training, {**self._told_settings(), **told}))
        self.renderer = Renderer(self.training.get_tokenizer())
        self._watch: Watch | None = None
        self._policy: tuple[int, SamplingClient] | None = None
        self._began = 0.0
        self._metrics = _last_metrics(log)
        self._done = self.start
        self._is_told_to_stop = False
        self.num_steps = self.start
        self.evaluated: dict[str, float] = {}
        """Metrics of the evaluation before this step; empty where there was none."""
        self.is_interrupted = False
        """Ctrl-C was pressed, or `on_step` returned False: the steps ended early."""

    @property
    def is_complete(self) -> bool:
        """Whether all steps were made: neither Ctrl-C nor `watch` has ended the run early."""
        return not self.is_interrupted and self._done >= self.num_steps

    def _told_settings(self) -> dict[str, Any]:
        """The settings of the recipe as the console compares them, `auto` as the number it is."""
        recipe = type(self._config).__module__.rpartition(".")[2]
        told = {**asdict(self._config), "learning_rate": self._peak, "recipe": recipe}
        if is_tinker_path(self._config.model):
            told["rank"] = self.training.get_info().lora_rank  # a checkpoint has its own
        return told

    def _peak_of(self, model: str) -> float:
        if self._config.learning_rate != "auto":
            return self._config.learning_rate
        peak = get_lr(model, self._config.rank) * self._config.AUTO_SHARE
        self._hooks.on_note(f"Learning rate {peak:.3g}, from the size of the model.")
        return peak

    def split(
        self,
        rows: Rows[T],
        convert: Callable[[T], R],
        *,
        at_most: int = 200,
    ) -> tuple[list[R], list[R]]:
        """Rows to train on and rows to evaluate on; those that do not convert are reported."""
        return split(rows, convert, self._config, self._hooks.on_note, at_most=at_most)

    def watch(
        self, metric: str, mode: Literal["min", "max"], stop_at: float | None = None
    ) -> Watch:
        """Watch a held-out metric as the settings `keep_best` and `patience` say."""
        config: Any = self._config
        return Watch(
            self.log,
            metric,
            mode=mode,
            keep=config.keep_best,
            patience=config.patience,
            stop_at=stop_at,
            on_note=self._hooks.on_note,
        )

    def policy(self, step: int) -> SamplingClient:
        """A sampler of the weights after `step` steps; they are saved once for all who ask."""
        if self._policy is None or self._policy[0] != step:
            self._policy = step, self.training.save_weights_and_get_sampling_client()
        return self._policy[1]

    @contextlib.contextmanager
    def steps(
        self, num_steps: int, evaluate: Evaluate | None, watch: Watch | None = None
    ) -> Iterator[Iterator[int]]:
        """The steps that are left. Each is saved, when its turn has come, after its block.

        Args:
            evaluate: Called every `eval_every` steps, before the step, and after the last one;
                None: nothing is held out.
            watch: Sees every evaluation, and may end the run there.
        """
        self._watch = watch
        if evaluate is None and watch is not None and watch.is_asked_for:
            self._hooks.on_note(
                "Too few rows to hold one out: patience, keep_best and stop_at_reward have no "
                "effect. Raise eval_share, or name a file by eval_data."
            )
        if watch is not None and watch.has_stopped(self.start):
            num_steps = self.start
        self.num_steps = num_steps
        note_if_finished(self._hooks.on_note, self.log, self.start, num_steps)
        with stop_between_steps(self._hooks.on_note) as stop:
            yield self._steps(stop, evaluate)
        if evaluate is not None and self.is_complete:
            evaluated = self._evaluated(evaluate, num_steps)
            self.log.metrics(num_steps, evaluated)
            self._metrics |= evaluated
            # Also for a run that was stopped in its last step; not for weights beyond num_steps.
            if watch is not None and self.start <= num_steps and not watch.has_stopped(num_steps):
                watch.see(self.save, num_steps, evaluated)

    def _steps(self, stop: StopRequest, evaluate: Evaluate | None) -> Iterator[int]:
        for step in range(self.start, self.num_steps):
            self._began = time.monotonic()
            self.evaluated = {}
            if evaluate is not None and step % self._config.eval_every == 0:
                self.evaluated = self._evaluated(evaluate, step)
                if self._watch and self._watch.see(self.save, step, self.evaluated):
                    self.log.metrics(step, self.evaluated)
                    self._metrics = self.evaluated
                    return
            yield step
            self._done = step + 1
            # No save here: `result` saves this step, with the weights for a sampler.
            if stop.requested or self._is_told_to_stop:
                self.is_interrupted = True
                return
            if self._done % self._config.save_every == 0:
                self.save(self._done)

    def _evaluated(self, evaluate: Evaluate, step: int) -> dict[str, float]:
        metrics = evaluate(step)
        self._hooks.on_eval(step, metrics)
        return metrics

    def save(self, step: int, *, for_sampler: bool = False) -> SavedStep:
        """Save state and optimizer so that the run can go on from `step`; note it in the log."""
        saved = save(self.training, self.log, step, for_sampler=for_sampler)
        self._hooks.on_save(saved)
        return saved

    def learning_rate(self, step: int) -> float:
        config = self._config
        return learning_rate_at(step, self.num_steps, self._peak, config.schedule, config.warmup)

    def optimizer(self, step: int) -> AdamParams:
        """The optimizer's numbers at a step."""
        return AdamParams(
            learning_rate=self.learning_rate(step),
            weight_decay=self._config.weight_decay,
            grad_clip_norm=self._config.clip,
        )

    def report(self, step: int, metrics: dict[str, float], num_tokens: int) -> None:
        """Log the metrics of a step, with its learning rate and its speed."""
        seconds = time.monotonic() - self._began
        self._metrics = {
            **metrics,
            "learning_rate": self.learning_rate(step),
            "tokens_per_s": num_tokens / seconds,
        }
        self.log.metrics(step, self._metrics)
        stop = self._hooks.on_step(step, self.num_steps, self._metrics) is False
        self._is_told_to_stop = stop

    def result(self, picture: tuple[Sequence[Panel], str, str]) -> Result:
        """Save the weights, unless this very step is saved already, and say how the run ended.

        Draws the curves (panels, title, file) of a run that has nothing left to do.
        """
        # A resumed run may have come further than it is asked to go now: its length can change.
        step = self.num_steps if self.is_complete else self._done
        saved = self.log.last
        if saved is None or saved.step != step or saved.sampler_path is None:
            saved = self.save(step, for_sampler=True)
        self.log.close()
        best = self._watch.best if self._watch and not self.is_interrupted else None
        result = Result(
            step=step,
            state_path=saved.state_path,
            sampler_path=saved.sampler_path or "",
            interrupted=self.is_interrupted,
            metrics=self._metrics,
            best_step=best.step if best else None,
            best_path=best.sampler_path if best else "",
        )
        if not self.is_interrupted:
            self.log.ended(asdict(result))
            plot(self.log, *picture)
        return result


def _last_metrics(log: RunLog) -> dict[str, float]:
    """The metrics of the step before the one that a run goes on from."""
    records = log.read_metrics()
    last = records[-1] if records else {}
    return {name: value for name, value in last.items() if name not in ("step", "time")}


def split(
    rows: Rows[T],
    convert: Callable[[T], R],
    config: RunOptions,
    on_note: OnNote,
    *,
    at_most: int = 200,
) -> tuple[list[R], list[R]]:
    """Rows to train on and rows to evaluate on; those that do not convert are reported."""
    train = usable(rows.train, convert)
    on_note(rows.train.report())
    if rows.held_out is None:
        return split_off(train, config.eval_share, at_most=at_most)
    held_out = usable(rows.held_out, convert)
    on_note(rows.held_out.report())
    return train, held_out


def save(
    training: TrainingClient, log: RunLog, step: int, *, for_sampler: bool = False
) -> SavedStep:
    """Save state and optimizer so that the run can go on from `step`; note it in the log."""
    name = f"step-{step:06d}"
    # A run that crashed after this save, and before its line in the log, saves this step again.
    state = training.save_state(name, overwrite=True)
    sampler = training.save_weights_for_sampler(name) if for_sampler else None
    saved = SavedStep(
        step=step,
        state_path=state.result().path,
        sampler_path=sampler.result().path if sampler else None,
    )
    # Last, because a resume trusts every line: it names only what the server has.
    log.saved(saved)
    return saved


def grad_norm(response: OptimStepResponse) -> dict[str, float]:
    """The norm of a step's gradient before clipping, where the server says it."""
    norm = (response.metrics or {}).get("grad_norm:mean")
    return {} if norm is None else {"grad_norm": norm}


def note_if_finished(on_note: OnNote, log: RunLog, start: int, num_steps: int) -> None:
    """Tell the user of a run that has nothing left to do: it should not look just trained."""
    if start >= num_steps:
        on_note(
            f"{log.folder} holds a finished run of {start} steps; nothing is trained, and what "
            "follows is that run's. Raise --epochs or --steps to train on, or name another folder."
        )


class StopRequest:
    """A flag: someone pressed Ctrl-C."""

    requested = False


@contextlib.contextmanager
def stop_between_steps(on_note: OnNote) -> Iterator[StopRequest]:
    """Let a first Ctrl-C end the loop after the step that runs; a second one interrupts at once.

    Only the main thread hears signals; elsewhere (a notebook's worker thread) nothing changes.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        with contextlib.suppress(RuntimeError):  # The signal may fall into the middle of a print.
            on_note("Stopping after this step, with a checkpoint; Ctrl-C again stops at once.")

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)

"""The skeleton of all recipes: start or resume, order of rows, evaluate, save, stop.

Everything random depends on the seed and the step alone, so that a resumed run sees what the
undisturbed one would have seen. The loops themselves stay in their own files, in the open: a `Run`
gives them the steps that are left, and they report each.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkex.contract.models import DEFAULT_MODEL as DEFAULT_MODEL
from tinkex.errors import APIStatusError, ConfigError, InvalidInputError, RequestFailedError
from tinkex.recipes.data import BadRow, Loaded, split_off
from tinkex.recipes.render import Renderer
from tinkex.runs.plots import Panel, plot
from tinkex.runs.run_log import RunLog, SavedStep, make_trackers

if TYPE_CHECKING:
    from tinkex import APIFuture, SamplingClient, ServiceClient, TrainingClient
    from tinkex.recipes.best import Watch

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
Schedule = Literal["linear", "constant"]
OnNote = Callable[[str], None]
"""Called with lines for a person, such as the report on bad rows."""
OnStep = Callable[[int, int, Mapping[str, float]], None]
"""Called after each step with the step, the number of steps, and the step's metrics."""
Evaluate = Callable[[int], dict[str, float]]
"""Measures the weights after so many steps on what is not trained on; gives metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Settings of every recipe's run. A recipe adds its own, and its own defaults."""

    log_dir: str
    """Where metrics and checkpoint names go. The same folder resumes."""
    model: str = DEFAULT_MODEL
    """A base model, or the `tinker://` path of a checkpoint to train on from."""
    rank: int = 32
    learning_rate: float = 1e-3
    schedule: Schedule = "linear"
    eval_share: float = 0.1
    """Share of the rows, pairs or prompts held out; at most 200, or 32 where they are answered."""
    eval_every: int = 20
    save_every: int = 50
    seed: int = 0
    trackers: tuple[str, ...] = ()
    """Any of wandb, trackio, tensorboard."""

    def __post_init__(self) -> None:
        check_positive(self, "rank", "learning_rate", "eval_every", "save_every")
        check_share(self)


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
    return RunLog(config.log_dir, settings, may_change=frozenset(may_change), trackers=trackers)


def _open_training(
    service: ServiceClient, log: RunLog, config: RunOptions
) -> tuple[TrainingClient, int]:
    """A fresh LoRA on the model, or the run's last saved state with its optimizer; and the step.

    A model that is a checkpoint (`tinker://...`) is trained on, with a fresh optimizer.
    """
    if log.last is None and config.model.startswith("tinker://"):
        return service.create_training_client_from_state(config.model), 0
    if log.last is None:
        return service.create_lora_training_client(
            base_model=config.model, rank=config.rank, seed=config.seed
        ), 0
    try:
        training = service.create_training_client_from_state_with_optimizer(log.last.state_path)
    except (APIStatusError, RequestFailedError) as exc:
        raise _elsewhere(log.folder, exc) from exc
    return training, log.last.step


def _elsewhere(folder: Path, exc: Exception) -> ConfigError:
    return ConfigError(
        f"{folder} holds a run whose checkpoint this server does not have ({exc}). Use the "
        "server it ran on, or start over in another log folder (quickstart: --fresh)."
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
        raise _elsewhere(folder, exc) from exc


def sampler_of(service: ServiceClient, model: str) -> SamplingClient:
    """A sampler of a base model, or of the checkpoint whose path `model` is."""
    if model.startswith("tinker://"):
        return service.create_sampling_client(model_path=model)
    return service.create_sampling_client(base_model=model)


class Run:
    """A run under way: the client that trains it, its log, and how far it has come.

    The skeleton of every recipe: steps in order, evaluations between them, a checkpoint now and
    then, Ctrl-C, the end. A recipe says what a step and an evaluation are.

        with run.steps(num_steps, evaluate) as steps:
            for step in steps:
                ...  # forward_backward, optim_step
                run.report(step, metrics, num_tokens)
        return run.result(PICTURE)
    """

    def __init__(
        self,
        service: ServiceClient,
        log: RunLog,
        config: RunOptions,
        on_step: OnStep,
        on_note: OnNote,
    ) -> None:
        self.training, self.start = _open_training(service, log, config)
        log.follow(ServerTracker(self.training))  # The server's console draws its metrics, too.
        self.renderer = Renderer(self.training.get_tokenizer())
        self._config, self._log, self._on_step, self._on_note = config, log, on_step, on_note
        self._watch: Watch | None = None
        self._policy: tuple[int, SamplingClient] | None = None
        self._began = 0.0
        self._metrics: dict[str, float] = {}
        self._done = self.start
        self.num_steps = self.start
        self.evaluated: dict[str, float] = {}
        """Metrics of the evaluation before this step; empty where there was none."""
        self.is_interrupted = False
        """Someone pressed Ctrl-C: the steps ended early."""

    @property
    def is_complete(self) -> bool:
        """Whether all steps were made: neither Ctrl-C nor `watch` has ended the run early."""
        return not self.is_interrupted and self._done >= self.num_steps

    def split(
        self, loaded: Loaded[T], convert: Callable[[T], R], *, at_most: int = 200
    ) -> tuple[list[R], list[R]]:
        """Rows to train on and rows held out; those that do not convert are reported."""
        rows = usable(loaded, convert)
        self._on_note(loaded.report())
        return split_off(rows, self._config.eval_share, at_most=at_most)

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
        if watch is not None and watch.has_stopped(self.start):
            num_steps = self.start
        self.num_steps = num_steps
        note_if_finished(self._on_note, self._log, self.start, num_steps)
        with stop_between_steps(self._on_note) as stop:
            yield self._steps(stop, evaluate)
        if evaluate is not None and self.is_complete:
            evaluated = evaluate(num_steps)
            self._log.metrics(num_steps, evaluated)
            self._metrics |= evaluated
            if watch is not None and self.start < num_steps:
                watch.see(self.training, num_steps, evaluated)

    def _steps(self, stop: StopRequest, evaluate: Evaluate | None) -> Iterator[int]:
        for step in range(self.start, self.num_steps):
            self._began = time.monotonic()
            self.evaluated = {}
            if evaluate is not None and step % self._config.eval_every == 0:
                self.evaluated = evaluate(step)
                if self._watch and self._watch.see(self.training, step, self.evaluated):
                    self._log.metrics(step, self.evaluated)
                    self._metrics = self.evaluated
                    return
            yield step
            self._done = step + 1
            # No save here: `result` saves this step, with the weights for a sampler.
            if stop.requested:
                self.is_interrupted = True
                return
            if self._done % self._config.save_every == 0:
                save(self.training, self._log, self._done)

    def learning_rate(self, step: int) -> float:
        config = self._config
        return learning_rate_at(step, self.num_steps, config.learning_rate, config.schedule)

    def report(self, step: int, metrics: dict[str, float], num_tokens: int) -> None:
        """Log the metrics of a step, with its learning rate and its speed."""
        seconds = time.monotonic() - self._began
        self._metrics = {
            **metrics,
            "learning_rate": self.learning_rate(step),
            "tokens_per_s": num_tokens / seconds,
        }
        self._log.metrics(step, self._metrics)
        self._on_step(step, self.num_steps, self._metrics)

    def result(self, picture: tuple[Sequence[Panel], str, str]) -> Result:
        """Save the weights, unless this very step is saved already, and say how the run ended.

        Draws the curves (panels, title, file) of a run that has nothing left to do.
        """
        # A resumed run may have come further than it is asked to go now: its length can change.
        step = self.num_steps if self.is_complete else self._done
        saved = self._log.last
        if saved is None or saved.step != step or saved.sampler_path is None:
            saved = save(self.training, self._log, step, for_sampler=True)
        self._log.close()
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
            self._log.ended(asdict(result))
            plot(self._log, *picture)
        return result


class ServerTracker:
    """Draws the metrics of a run in the console of the server that trains it.

    Nothing waits for it, and a server that does not take metrics, such as the hosted one, is asked
    once. What the server measures by itself is left out, and so is what is no number: the run's
    own log has it, and what to do about a loss that is not finite is the loop's to say.
    """

    MEASURED = frozenset({"learning_rate", "tokens_per_s", "num_tokens"})

    def __init__(self, training: TrainingClient) -> None:
        self._training = training
        self._sent: APIFuture[None] | None = None
        self._is_refused = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        drawn = {
            name: value
            for name, value in metrics.items()
            if name not in self.MEASURED and math.isfinite(value)
        }
        if self._sent is not None and self._sent.done():
            self._look(timeout_s=None)
        if drawn and not self._is_refused:
            self._sent = self._training.log_metrics(drawn, step=step)

    def close(self) -> None:
        if self._sent is not None:
            self._look(timeout_s=5.0)

    def _look(self, timeout_s: float | None) -> None:
        assert self._sent is not None
        try:
            self._sent.result(timeout_s)
        except Exception as exc:  # A picture is not worth a run.
            if not self._is_refused:
                logger.info("the server does not draw this run's metrics: %s", exc)
            self._is_refused = True


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


def batch_at(rows: Sequence[T], size: int, step: int, seed: int) -> list[T]:
    """The rows of one step: the data shuffled anew each epoch, read end to end."""
    return [
        rows[_shuffled(len(rows), seed, position // len(rows))[position % len(rows)]]
        for position in range(step * size, (step + 1) * size)
    ]


# A step asks for as many positions as it has rows: the order of an epoch is made once for them.
_order: dict[tuple[int, int, int], list[int]] = {}


def _shuffled(num_rows: int, seed: int, epoch: int) -> list[int]:
    key = (num_rows, seed, epoch)
    if key not in _order:
        if len(_order) > 8:
            _order.clear()
        order = list(range(num_rows))
        # Text is hashed alike in every process, and seed 0 epoch 1 is not seed 1 epoch 0.
        random.Random(f"{seed}/{epoch}").shuffle(order)
        _order[key] = order
    return _order[key]


def learning_rate_at(step: int, num_steps: int, peak: float, schedule: Schedule) -> float:
    """`linear` falls from the peak to a tenth of it; `constant` stays."""
    if schedule == "constant" or num_steps < 2:
        return peak
    return peak * (1 - 0.9 * step / (num_steps - 1))


def usable(loaded: Loaded[T], convert: Callable[[T], R]) -> list[R]:
    """Convert every row; a row that does not convert joins the bad ones."""
    converted, kept = [], []
    for row in loaded.rows:
        try:
            converted.append(convert(row))
            kept.append(row)
        except InvalidInputError as exc:
            loaded.bad.append(BadRow(line=row.line, reason=str(exc)))  # type: ignore[attr-defined]
    loaded.rows = kept
    loaded.bad.sort(key=lambda bad: bad.line)
    if not converted:
        raise InvalidInputError(f"No usable row.\n{loaded.report()}")
    return converted


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(config, name)}.")


def check_share(config: Any) -> None:
    if not 0 <= config.eval_share < 1:
        raise ConfigError(
            f"eval_share must be at least 0 and below 1, got {config.eval_share}: it is the part "
            "of the rows that is held out, and the others are trained on."
        )


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


def print_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
    """The plainest progress report."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    print(f"step {step + 1}/{num_steps}  {shown}", flush=True)

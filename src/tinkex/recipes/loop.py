"""The few things that SFT, RL and DPO loops share: start or resume, order of rows, save, stop.

Everything random depends on the seed and the step alone, so that a resumed run sees what the
undisturbed one would have seen. The loops themselves stay in their own files, in the open.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkex.contract.models import DEFAULT_MODEL as DEFAULT_MODEL
from tinkex.errors import APIStatusError, ConfigError, InvalidInputError, RequestFailedError
from tinkex.recipes.run_log import RunLog, SavedStep, make_trackers

if TYPE_CHECKING:
    from tinkex import APIFuture, SamplingClient, ServiceClient, TrainingClient
    from tinkex.recipes.best import Best
    from tinkex.recipes.data import Loaded

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
Schedule = Literal["linear", "constant"]
OnNote = Callable[[str], None]
"""Called with lines for a person, such as the report on bad rows."""
OnStep = Callable[[int, int, Mapping[str, float]], None]
"""Called after each step with the step, the number of steps, and the step's metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What the run of every recipe has. A recipe adds its own, and its own defaults."""

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


def open_training(
    service: ServiceClient, log: RunLog, config: RunOptions
) -> tuple[TrainingClient, int]:
    """A fresh LoRA on the model, or the run's last saved state with its optimizer; and the step.

    A model that is a checkpoint (`tinker://...`) is trained on, with a fresh optimizer. From here
    on the console of the server draws the metrics of the log, too.
    """
    training, step = _opened(service, log, config)
    log.follow(ServerTracker(training))
    return training, step


def _opened(service: ServiceClient, log: RunLog, config: RunOptions) -> tuple[TrainingClient, int]:
    if log.last is None and config.model.startswith("tinker://"):
        return service.create_training_client_from_state(config.model), 0
    if log.last is None:
        return service.create_lora_training_client(
            base_model=config.model, rank=config.rank, seed=config.seed
        ), 0
    try:
        training = service.create_training_client_from_state_with_optimizer(log.last.state_path)
    except (APIStatusError, RequestFailedError) as exc:
        raise _elsewhere(log, exc) from exc
    return training, log.last.step


def _elsewhere(log: RunLog, exc: Exception) -> ConfigError:
    return ConfigError(
        f"{log.folder} holds a run whose checkpoint this server does not have ({exc}). Use the "
        "server it ran on, or start over in another log folder (quickstart: --fresh)."
    )


def finished(service: ServiceClient, log: RunLog, on_note: OnNote) -> Result | None:
    """The result of a run that has nothing left to do; None: train.

    Ask before `open_training`, which makes a run on the server.

    Raises:
        ConfigError: The run's checkpoint is not on this server.
    """
    if log.end is None:
        return None
    result = Result(**log.end)
    try:
        service.create_rest_client().get_weights_info_by_tinker_path(result.sampler_path).result()
    except (APIStatusError, RequestFailedError) as exc:
        raise _elsewhere(log, exc) from exc
    note_if_finished(on_note, log, result.step, result.step)
    log.close()
    return result


def sampler_of(service: ServiceClient, model: str) -> SamplingClient:
    """A sampler of a base model, or of the checkpoint whose path `model` is."""
    if model.startswith("tinker://"):
        return service.create_sampling_client(model_path=model)
    return service.create_sampling_client(base_model=model)


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
        told = {
            name: value
            for name, value in metrics.items()
            if name not in self.MEASURED and math.isfinite(value)
        }
        if self._sent is not None and self._sent.done():
            self._look(timeout_s=None)
        if told and not self._is_refused:
            self._sent = self._training.log_metrics(told, step=step)

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
    state = training.save_state(name, overwrite=True)
    sampler = training.save_weights_for_sampler(name) if for_sampler else None
    saved = SavedStep(
        step=step,
        state_path=state.result().path,
        sampler_path=sampler.result().path if sampler else None,
    )
    log.saved(saved)
    return saved


def finish(
    training: TrainingClient,
    log: RunLog,
    step: int,
    *,
    interrupted: bool,
    metrics: dict[str, float],
    best: Best | None = None,
) -> Result:
    """Save what there is, unless this very step is saved already."""
    saved = log.last
    if saved is None or saved.step != step or saved.sampler_path is None:
        saved = save(training, log, step, for_sampler=True)
    log.close()
    result = Result(
        step=step,
        state_path=saved.state_path,
        sampler_path=saved.sampler_path or "",
        interrupted=interrupted,
        metrics=metrics,
        best_step=best.step if best else None,
        best_path=best.sampler_path if best else "",
    )
    if not interrupted:
        log.ended(asdict(result))
    return result


def batch_at(rows: Sequence[T], size: int, step: int, seed: int) -> list[T]:
    """The rows of one step: the data shuffled anew each epoch, read end to end."""
    return [
        rows[_shuffled(len(rows), seed, position // len(rows))[position % len(rows)]]
        for position in range(step * size, (step + 1) * size)
    ]


_order: dict[tuple[int, int, int], list[int]] = {}


def _shuffled(num_rows: int, seed: int, epoch: int) -> list[int]:
    key = (num_rows, seed, epoch)
    if key not in _order:
        if len(_order) > 8:
            _order.clear()
        order = list(range(num_rows))
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
    from tinkex.recipes.data import BadRow

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
    """A run that has nothing left to do should not look like one that was just trained."""
    if start >= num_steps:
        on_note(
            f"{log.folder} holds a finished run of {start} steps; nothing is trained, and what "
            "follows is that run's. Raise --epochs or --steps to train on, or name another folder."
        )


class StopRequest:
    """Whether someone pressed Ctrl-C."""

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

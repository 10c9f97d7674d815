"""Show a person how far a run is: a bar on a terminal, a plain line now and then elsewhere.

Everything goes to stderr; stdout belongs to results.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tinkex.events import Event, subscribe

_LINE_EVERY_S = 5.0  # Where nobody watches: a log of a long run should stay short.
_LOADING = re.compile(r"loading .* \d+ %")


class Steps:
    """A recipe's `on_step`: moves the bar, or prints a line every few seconds."""

    def __init__(self, headline: str, console: Console) -> None:
        self._headline = headline
        self._console = console
        self._printed_at = 0.0
        self.is_under_way = False
        """A step was made."""
        self._bar: Progress | None = None
        self._task: Any = None

    def __call__(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.is_under_way = True
        shown = [f"{label(n).lower()} {_short(metrics[n])}" for n in RESULTS if n in metrics]
        if "tokens_per_s" in metrics:
            shown.append(f"tokens/s {metrics['tokens_per_s']:.0f}")
        text = "  ".join(shown)
        if not self._console.is_terminal:
            self._line(step, num_steps, text)
            return
        # The bar appears with the first step: notes before it need no bar that stands still.
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(
                self._headline, total=num_steps, completed=step, text=text
            )
            self._bar.start()
        self._bar.update(self._task, completed=step + 1, text=text)

    def _line(self, step: int, num_steps: int, text: str) -> None:
        now = time.monotonic()
        if step + 1 == num_steps or now - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = now
            self._console.print(f"{self._headline} {step + 1}/{num_steps}  {text}")

    def note(self, text: str) -> None:
        """A recipe's `on_note`: a line of its own, above the bar while that moves."""
        self._console.print(text, markup=False, emoji=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


RESULTS = (
    "loss",
    "reward",
    "accuracy",
    "held_out_loss",
    "held_out_accuracy",
    "held_out_reward",
    "kl",
    "held_out_kl",
)
"""The metrics that say how well a run goes, in the order they are shown."""


def label(metric: str) -> str:
    return (
        metric.replace("held_out", "held-out")
        .replace("_per_s", "/s")
        .replace("_", " ")
        .capitalize()
        .replace("Kl", "KL")
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"


def stderr_console() -> Console:
    return Console(file=sys.stderr, stderr=True, highlight=False, soft_wrap=True, emoji=False)


@contextlib.contextmanager
def steps(headline: str) -> Iterator[Steps]:
    shown = Steps(headline, stderr_console())
    try:
        yield shown
    finally:
        shown.close()


@contextlib.contextmanager
def loading_shown() -> Iterator[None]:
    """Say how far the server is with a base model that takes long to load."""
    console = stderr_console()

    def show(event: Event) -> None:
        reason = str(event.fields.get("reason"))
        if event.name == "queue.change" and _LOADING.fullmatch(reason):
            console.print(f"L{reason[1:]}", markup=False)

    forget = subscribe(show)
    try:
        yield
    finally:
        forget()


@contextlib.contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner whose text can be changed; plain lines where no one watches."""
    console = stderr_console()
    if console.is_terminal:
        with console.status(escape(text)) as status:
            yield lambda changed: status.update(escape(changed))
    else:
        console.print(text, markup=False)
        yield lambda changed: console.print(changed, markup=False, emoji=False)

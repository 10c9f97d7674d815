"""`rollouts.jsonl` of a run folder: what the model said at each step, and what it earned.

One JSON object a line, one answer each:

    {"step": 3, "group": 0, "prompt": "...", "text": "...", "tokens": [..], "pieces": ["..", ..],
     "logprobs": [..], "reward": 1.0, "advantage": 0.5, "snapshot": "tinker://..."}

Answers of one prompt share `step` and `group`. `pieces` is the text of each token: joined it is the
text, and a token in the middle of a character has none. The console draws them (`tinkex console
--log-dir`). Knows files and tokens; nothing of loops.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinkex.chat.detokenizer import pieces_of
from tinkex.contract.run_folder import ROLLOUTS_FILE
from tinkex.recipes.render import Renderer
from tinkex.runs import json_lines

__all__ = ["MAX_BYTES", "Rollout", "RolloutLog"]

logger = logging.getLogger(__name__)
MAX_BYTES = 256 * 1024 * 1024
"""Most bytes of one run's file. Later answers are not written, and a warning says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A sampled answer, with its prompt and its reward."""

    step: int
    group: int
    """Answers to the same prompt at the same step have the same number."""
    prompt: str
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reward: float | None = None
    advantage: float | None = None
    snapshot: str = ""
    """The weights that said it."""
    pieces: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        renderer: Renderer,
        prompt: Sequence[int],
        said: Sequence[int],
        step: int,
        **fields: Any,
    ) -> Rollout:
        """An answer from its tokens, sampled by the weights of a step."""
        return cls(
            step=step,
            prompt=str(renderer.tokenizer.decode(list(prompt))),
            text=renderer.text(said),
            tokens=said,
            pieces=pieces_of(renderer.tokenizer, said),
            snapshot=f"step-{step:06d}",
            **fields,
        )


class RolloutLog:
    """Writes the file. A resumed run says from which step on the old lines no longer count."""

    def __init__(
        self, folder: str | Path, *, start_step: int = 0, max_bytes: int = MAX_BYTES
    ) -> None:
        self.file = Path(folder) / ROLLOUTS_FILE
        self._max_bytes = max_bytes
        self._is_full = False
        json_lines.keep(self.file, lambda line: line.get("step", 0) < start_step)

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """Append answers, all of them or, when the file would grow too large, none."""
        text = "".join(json.dumps(_plain(rollout)) + "\n" for rollout in rollouts)
        size = self.file.stat().st_size if self.file.exists() else 0
        if size + len(text) > self._max_bytes:
            if not self._is_full:
                logger.warning(
                    "%s is full (%d MB): later answers are not written", self.file, size >> 20
                )
            self._is_full = True
            return
        with self.file.open("a", encoding="utf-8") as out:
            out.write(text)


def _plain(rollout: Rollout) -> dict[str, Any]:
    record = asdict(rollout)
    record["tokens"] = [int(token) for token in rollout.tokens]
    record["logprobs"] = [round(float(value), 5) for value in rollout.logprobs]
    return record

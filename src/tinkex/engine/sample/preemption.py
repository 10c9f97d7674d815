"""What a sampler does when a pass finds no memory, and whose job is to blame.

First all samples start again from what was drawn so far, in passes an eighth the size; the draw of
a token depends on its seed and place alone, so nothing of it shows in the result. If such a small
pass fails as well, the job with most tokens in it fails, with numbers and advice, and the others go
on. Members of a group come to the same end, since they planned the same passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tinkex.engine.sample.running_jobs import RunningJob, sample_of
from tinkex.engine.sample.scheduler import Chunk, SchedulerConfig

SMALLER = 8
NUM_SMALL = 64
"""Small passes that must go well before larger ones are tried again."""


class Preemption:
    def __init__(self, normal: SchedulerConfig) -> None:
        self._normal = normal
        self._left = 0
        self._lengths: Counter[str] = Counter()
        self._num_samples = 0

    def planned(self, chunks: Sequence[Chunk]) -> None:
        """Note the chunks of the pass that is about to run."""
        self._lengths.clear()
        self._num_samples = len(chunks)
        for chunk in chunks:
            self._lengths[sample_of(chunk).job_id] += chunk.length

    def passed(self) -> SchedulerConfig | None:
        """A pass went well; gives the config to go on with when that changes."""
        if not self._left:
            return None
        self._left -= 1
        return None if self._left else self._normal

    def failed(self) -> tuple[SchedulerConfig, bool]:
        """A pass found no memory: the config to go on with, and whether a job is to blame."""
        was_small, self._left = self._left > 0, NUM_SMALL
        # An eighth of what the pass held, not of what it might have held: it may have been small.
        running = min(self._normal.max_running, self._num_samples)
        num_tokens = min(self._normal.max_pass_tokens, self._lengths.total())
        config = replace(
            self._normal,
            max_running=max(1, running // SMALLER),
            max_pass_tokens=max(1, num_tokens // SMALLER),
        )
        return config, was_small

    def to_blame(self, requests: Iterable[RunningJob]) -> RunningJob:
        """Of the jobs that are still there, the one that had most of the pass."""
        return max(requests, key=lambda request: self._lengths[request.job.job_id])

    def text(self, why: str, request: RunningJob) -> str:
        total, mine = self._lengths.total(), self._lengths[request.job.job_id]
        return (
            f"the sampling pass failed: {why}. It held {total} tokens of {self._num_samples} "
            f"samples, {mine} of them of this job, whose prompt has {len(request.job.prompt)}; "
            "ask for fewer samples or shorter prompts at a time, or start the server with less "
            "KV memory"
        )

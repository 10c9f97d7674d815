"""The work that a loop hands to whoever computes: torch on a device, or the toy.

The loop decides whose turn it is; a compute knows models, adapters and weights, and nothing of
queues. Everything here is called by the loop's thread, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tinkex.engine import jobs


class Packing(NamedTuple):
    """The passes of an adapter's training jobs: jobs of equal packing may share one."""

    base_model: str
    max_tokens: int


class RunningSamples(Protocol):
    """The running sample jobs of one base model; each emits its own events."""

    @property
    def next_alone(self) -> str:
        """The job that has the next pass to itself; empty when several share it."""
        ...

    def step(self, *, look_ahead: bool) -> object:
        """Run one pass. With `look_ahead` its tokens may be told by the next step."""
        ...

    def cancel(self, job_id: str) -> bool:
        """End a job as cancelled. False when it is not here."""
        ...

    def cancel_all(self) -> None: ...

    def fail_all(self, message: str) -> None: ...


class Compute(Protocol):
    @property
    def shares_passes(self) -> bool:
        """Whether training jobs of several adapters may share a pass."""
        ...

    def begin(self) -> None:
        """Prepare the loop's thread; called once, before anything else."""
        ...

    def packing(self, adapter_id: str) -> Packing | None:
        """The packing of an adapter's passes; None for one that is not loaded."""
        ...

    def train(self, together: Sequence[jobs.TrainJob]) -> Sequence[jobs.TrainResult | Exception]:
        """Run training jobs in passes that they share, and give a result or an error for each.

        Calls the loop's `between_passes` after each pass but the last.
        """
        ...

    def run(self, job: jobs.Job, emit: jobs.Emit) -> jobs.Result | None:
        """Run any other job but a save. A sample is only started: it has no result yet."""
        ...

    def capture(self, job: jobs.SaveAdapterJob) -> Callable[[], jobs.AdapterResult]:
        """Copy an adapter as it is now; what is returned writes the copy, on another thread."""
        ...

    def submit_to_group(self, job: jobs.GroupJob, emit: jobs.Emit) -> None:
        """Take part in a collective with other engines. Called by any thread, returns at once."""
        ...

    def sampling(self) -> Sequence[RunningSamples]:
        """The samplers that have something to do."""
        ...

    def held_bytes(self) -> Mapping[str, int]:
        """Memory in use by `heartbeat.KINDS`; weights whose folder is gone are forgotten first."""
        ...

    def rest(self) -> None:
        """Give up what can be made again, because nothing came for long."""
        ...

    def close(self) -> None: ...

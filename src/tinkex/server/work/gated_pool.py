"""The pool and the lines in front of it: for training, for samples, and for jobs on trial."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.server.fairness.gate import FairGate
from tinkex.server.workers.pool import Pool


@dataclass(frozen=True, slots=True, eq=False)
class GatedPool:
    pool: Pool
    training: FairGate
    sampling: FairGate
    trials: FairGate
    """For jobs that shared a pass in which a worker was lost, in a line of their own, so that
    nobody else's work stands behind them. As many at a time as there are workers but one: a loss
    has one author, no trial waits for all others, and a worker is left for everybody else."""

    @staticmethod
    def before(pool: Pool, *, max_training: int, max_sampling: int) -> GatedPool:
        """Gates as wide as the pool is large, whenever it grows or shrinks."""
        gated = GatedPool(pool, FairGate(max_training), FairGate(max_sampling), FairGate(1))

        def resize() -> None:
            gated.training.resize(max_training * pool.size)
            gated.sampling.resize(max_sampling * pool.size)
            gated.trials.resize(max(1, pool.size - 1))

        resize()
        pool.watch(resize)
        return gated

    def trouble(self) -> str:
        """Why no worker takes jobs and gets on with them; empty when one does."""
        if not self.pool.is_ready:
            return f"{self.pool.name} is starting"
        return "" if self.pool.is_moving else f"{self.pool.name} has work and makes no progress"

"""The toy engine: the loop of all engines over the toy's compute."""

from __future__ import annotations

from tinkex.engine import jobs
from tinkex.engine.loop.loop import Loop
from tinkex.engine.toy.compute import ToyCompute
from tinkex.engine.toy.config import ToyConfig
from tinkex.engine.toy.latency import SlowEngine


def toy_engine(config: ToyConfig | None = None) -> jobs.Engine:
    """An engine that computes at once, or takes the time that its settings say."""
    config = config or ToyConfig()
    loop = Loop(ToyCompute(config), name="toy-engine")
    return SlowEngine(loop, config) if config.takes_time else loop

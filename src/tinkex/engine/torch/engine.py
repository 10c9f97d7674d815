"""The engine of one device: the loop of all engines over torch's compute."""

from __future__ import annotations

from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.loop.loop import Loop
from tinkex.engine.torch.compute import TorchCompute
from tinkex.engine.torch.config import EngineConfig


class TorchEngine(Loop):
    """See `jobs.Engine`."""

    compute: TorchCompute

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        heartbeat = Heartbeat()
        super().__init__(
            TorchCompute(self.config, heartbeat, after_pass=self.between_passes),
            heartbeat,
            name="torch-engine",
            train_share=self.config.train_share,
            idle_s=self.config.idle_s,
        )

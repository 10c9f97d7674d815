"""llmcomp: a finetuning job on Tinker, in this process and in its detached worker."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "peers"))
from llmcomp.finetuning.manager import FinetuningManager
from llmcomp.finetuning.params import TinkerTrainingParams
from steps import check, main_of

STEPS = ("blocking_job", "detached_job", "models")


class Jobs:
    def __init__(self) -> None:
        self.manager = FinetuningManager(data_dir="llmcomp")

    def _params(self, **more: object) -> TinkerTrainingParams:
        return TinkerTrainingParams(
            api_key=os.environ["TINKER_API_KEY"],
            file_name="conversations.jsonl",
            base_model=os.environ["FRAMEWORK_MODEL"],
            batch_size=8,
            lora_rank=8,
            save_every=2,
            **more,
        )

    def blocking_job(self) -> str:
        path = self.manager.create_job(self._params(suffix="one"), blocking=True)
        check(str(path).startswith("tinker://"), f"{path}")
        return path

    def detached_job(self) -> str:
        self.manager.create_job(self._params(suffix="two", seed=7))
        for _ in range(120):
            counts = self.manager.update_jobs()
            if len(self.manager.get_model_list()) > 2:  # each job leaves a checkpoint and its end
                return f"{counts}"
            time.sleep(1)
        raise TimeoutError(f"the detached worker did not end: {counts}")

    def models(self) -> str:
        names = self.manager.get_model_list()
        check(all(name.startswith("tinker://") for name in names), f"{names}")
        return f"{len(names)} models"


if __name__ == "__main__":
    sys.exit(main_of(Jobs(), STEPS))

"""Axolotl's Hatchery plugin: its data pipeline here, every pass on Tinker; SFT, then RL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "peers"))
from steps import check, main_of

STEPS = ("sft", "rl")


class Axolotl:
    def sft(self) -> str:
        return self._train("sft", {"loss_fn": "cross_entropy", "save_steps": 1})

    def rl(self) -> str:
        """The plugin's own reward, on sampled completions."""
        rewards = ["axolotl.integrations.hatchery.rewards.math_reward.math_reward"]
        sampling = {"num_samples": 2, "max_sample_tokens": 8}
        more = {"loss_fn": "importance_sampling", "reward_funcs": rewards, **sampling}
        return self._train("rl", more)

    def _train(self, name: str, settings: dict) -> str:
        config = {
            "base_model": os.environ["FRAMEWORK_MODEL"],
            "plugins": ["axolotl.integrations.hatchery.HatcheryPlugin"],
            "hatchery": {"backend": "tinker", "lora_rank": 8, **settings},
            "datasets": [
                {"path": "conversations.jsonl", "ds_type": "json", "type": "chat_template"}
            ],
            "chat_template": "chatml",
            "sequence_len": 256,
            "learning_rate": 1e-4,
            "optimizer": "adamw_torch",
            "num_epochs": 1,
            "max_steps": 2,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "output_dir": f"axolotl-{name}",
            "dataset_prepared_path": f"prepared-{name}",
        }
        file = Path(f"{name}.yaml")
        file.write_text(json.dumps(config))  # JSON is YAML
        program = str(Path(sys.executable).with_name("axolotl"))
        environment = os.environ | {"AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [program, "train", str(file), "--launcher", "python"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=420,
        )
        said = done.stdout + done.stderr
        print(said[-6000:], file=sys.stderr)
        check(done.returncode == 0, said[-300:])
        check("Remote checkpoint saved: final" in said, said[-300:])
        return "2 steps"


if __name__ == "__main__":
    sys.exit(main_of(Axolotl(), STEPS))

"""Trinity-RFT: explorer and trainer as Ray actors, both on Tinker; two steps of GRPO."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "peers"))
from steps import check, main_of

MODEL = os.environ["FRAMEWORK_MODEL"]
STEPS = ("ray", "grpo", "stop")
TASKS = {
    "name": "gsm8k",
    "storage_type": "file",
    "path": "openai/gsm8k",
    "subset_name": "main",
    "split": "train",
    "format": {"prompt_key": "question", "response_key": "answer"},
    "rollout_args": {"temperature": 1.0},
}


def beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def config(name: str) -> dict:
    return {
        "project": "peers",
        "name": name,
        "checkpoint_root_dir": str(Path("trinity").absolute()),
        "model": {
            "model_path": MODEL,
            "max_prompt_tokens": 256,
            "max_response_tokens": 8,
            "tinker": {"enable": True, "rank": 8, "base_url": os.environ["TINKER_BASE_URL"]},
        },
        "cluster": {"node_num": 1, "gpu_per_node": 1},
        "trainer": {"save_interval": 2, "total_steps": 2},
        "monitor": {"monitor_type": "tensorboard"},
    }


class Trinity:
    def ray(self) -> str:
        """A Ray of its own, on a free port, with the number of GPUs that the check asks for."""
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        flags = ("--node-ip-address", "127.0.0.1", "--include-dashboard", "false")
        size = ("--num-cpus", "8", "--num-gpus", "1", "--object-store-memory", "200000000")
        command = [beside("ray"), "start", "--head", "--block", f"--port={port}", *flags, *size]
        self.head = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        for _ in range(60):
            if subprocess.run([beside("ray"), "status"], capture_output=True).returncode == 0:
                return os.environ["RAY_ADDRESS"]
            time.sleep(1)
        raise TimeoutError("ray did not start")

    def stop(self) -> None:
        self.head.terminate()
        self.head.wait(60)

    def grpo(self) -> str:
        return self._run(
            config("grpo")
            | {
                "mode": "both",
                "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
                "buffer": {
                    "batch_size": 2,
                    "total_steps": 2,
                    "explorer_input": {"taskset": TASKS, "default_workflow_type": "math_workflow"},
                    "trainer_input": {
                        "experience_buffer": {"name": "experiences", "storage_type": "queue"}
                    },
                },
                "explorer": {"runner_per_model": 1, "rollout_model": {"engine_num": 1}},
                "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1},
            }
        )

    def _run(self, settings: dict) -> str:
        """`trinity run`; the trainer leaves the path of its checkpoint."""
        file = Path(f"{settings['name']}.yaml")
        file.write_text(json.dumps(settings))  # JSON is YAML
        command = [beside("trinity"), "run", "--config", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=420)
        said = (done.stdout + done.stderr)[-6000:]
        print(said, file=sys.stderr)
        check(done.returncode == 0, said[-300:])
        paths = [*Path("trinity").rglob(f"{settings['name']}*/**/remote_checkpoint_path.txt")]
        check(bool(paths), "no checkpoint was saved")
        path = paths[0].read_text()
        check(path.startswith("tinker://"), path)
        return path


if __name__ == "__main__":
    sys.exit(main_of(Trinity(), STEPS))

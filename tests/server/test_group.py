"""A group of two processes as the server's worker: training, samples, files, and its members' end.

With `--deterministic` a run through a killed and a stopped member has the bits of a calm one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datums import datum, train_datum
from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine" / "families"))
from table import make

from tinkex import ServiceClient, types
from tinkex.engine import jobs
from tinkex.engine.device.backend import load_decoder
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import ConfigError
from tinkex.server.process.config import ServerConfig

PROMPT = [(3 + i * 5) % 61 for i in range(20)]


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def followers(server: ServerProcess) -> list[int]:
    """Those there are; waited for while a group is being formed."""
    while True:
        with contextlib.suppress(OSError):  # a worker that has just ended
            if found := [pid for worker in server.worker_pids() for pid in children(worker)]:
                return found
        time.sleep(0.05)


def row(start: int) -> types.Datum:
    return datum([(start + i * 7) % 61 for i in range(24)])


def train(client: Any, disturb: dict[int, signal.Signals], server: ServerProcess) -> list[float]:
    """Five steps; in the middle of some a follower is sent a signal."""
    losses = []
    for step in range(5):
        passes = [client.forward_backward([row(step), row(9)], "cross_entropy")]
        done = client.optim_step(types.AdamParams(learning_rate=5e-3))
        if step in disturb:
            for pid in followers(server):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, disturb[step])
        passes.append(client.forward([row(5)], "cross_entropy"))
        losses += [one.result().metrics["loss:sum"] for one in passes]
        done.result()
    return losses


def weights(server: ServerProcess, client: Any, name: str) -> tuple[Path, bytes]:
    client.save_state(name).result()
    (folder,) = (server.folder / "data" / "checkpoints").glob(f"*/weights/{name}-*")
    return folder, (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.timeout(1200)
def test_a_run_over_a_group_survives_its_members(tmp_path: Path) -> None:
    make("qwen3_5_moe", tmp_path / "model")
    settings = tmp_path / "settings.toml"
    settings.write_text("group_timeout_s = 12.0\n")
    flags = ("--device", "cpu", "--group", "2", "--deterministic", "--snapshot-every", "4")
    model = str(tmp_path / "model")
    with ServerProcess(
        tmp_path / "server", *flags, "--model", model, "--config", str(settings)
    ) as server:
        with ServiceClient(base_url=server.base_url, api_key="tml-group") as service:
            calm, rough = (
                service.create_lora_training_client(model, rank=4, seed=11) for _ in range(2)
            )
            before = train(calm, {}, server)
            (first,) = followers(server)
            assert train(rough, {1: signal.SIGKILL, 3: signal.SIGSTOP}, server) == before
            assert first not in followers(server)
            assert len(followers(server)) == 1
            # A leader may also be ended from within the collective that lost the killed one, before
            # it can say why. That the group was formed anew after each signal is what counts.
            assert server.log.count("a group of 2:") >= 3
            assert "did not come to" in server.log
            (folder, bits), (_, others) = (
                weights(server, c, n) for c, n in ((calm, "calm"), (rough, "rough"))
            )
            assert bits == others
            sampled = [
                service.create_sampling_client(
                    model_path=client.save_weights_for_sampler("s").result().path
                )
                .sample(
                    types.ModelInput.from_ints(PROMPT),
                    num_samples=2,
                    sampling_params=types.SamplingParams(max_tokens=8, seed=3, stop=[]),
                )
                .result()
                for client in (calm, rough)
            ]
            tokens = [[list(s.tokens) for s in one.sequences] for one in sampled]
            assert tokens[0] == tokens[1]
    check_alone(model, folder, before[-1], tokens[0][0], sampled[0].sequences[0].logprobs)


def check_alone(
    model: str, folder: Path, loss: float, tokens: list[int], logprobs: list[float]
) -> None:
    """One device, in this process, reads the group's file and scores what the group did."""
    trainer = Trainer(load_decoder(model), base_model=model)
    trainer.load(
        jobs.LoadAdapterJob(
            job_id="", adapter_id="a", base_model=model, folder=str(folder), with_optimizer=True
        )
    )
    data = (train_datum(PROMPT + tokens),)
    (scored,) = trainer.train(
        [jobs.TrainJob(job_id="", adapter_id="a", data=data, loss_fn="cross_entropy")]
    )
    assert isinstance(scored, jobs.TrainResult)
    ours = scored.outputs[0]["logprobs"][len(PROMPT) - 1 :]
    np.testing.assert_allclose(np.asarray(ours), logprobs, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(torch.tensor(loss))


@pytest.mark.timeout(1200)
def test_a_model_that_a_group_cannot_hold_is_refused_at_start(tmp_path: Path) -> None:
    make("qwen3-yarn", tmp_path / "model")
    command = [sys.executable, "-m", "tinkex.server", "--port", "0", "--device", "cpu"]
    command += ["--data-dir", str(tmp_path / "data"), "--model", str(tmp_path / "model")]
    done = subprocess.run([*command, "--group", "3"], capture_output=True, text=True, timeout=1000)
    words = "has 4 attention heads, which 3 devices cannot share evenly. Serve it with --group 2"
    assert words in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_size": 17}, "group_size must be at most 16"),
        ({"group_size": 0}, "group_size must be positive"),
        ({"group_size": 2, "engine": "toy"}, "the toy engine has no model to divide"),
        ({"group_size": 2, "devices": ("cuda:0",)}, "Groups of 2 need 2 different ones"),
        ({"group_size": 2, "devices": ("cuda:0,cuda:0",)}, "--device cuda:0,cuda:1"),
        ({"group_size": 2, "devices": ("cuda:0,cpu",)}, "are all of one kind"),
        (
            {"group_size": 2, "devices": ("cuda:0,cuda:1",), "num_workers": 2},
            "Name 2 devices a worker",
        ),
    ],
)
def test_settings_that_make_no_group_are_refused_in_words(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({"group_size": 2}, ["auto:0+auto:1"]),
        ({"group_size": 2, "num_workers": 2}, ["auto:0+auto:1", "auto:2+auto:3"]),
        ({"group_size": 2, "devices": ("cpu",)}, ["cpu+cpu"]),
        (
            {"group_size": 2, "devices": ("cuda:0,cuda:1,cuda:2,cuda:3",)},
            ["cuda:0+cuda:1", "cuda:2+cuda:3"],
        ),
    ],
)
def test_every_group_has_its_devices(settings: dict[str, Any], devices: list[str]) -> None:
    assert ServerConfig(**settings).worker_devices == devices

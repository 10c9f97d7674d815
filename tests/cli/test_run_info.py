"""`tinkex run info` says where the time of a step goes and what the workers of a run hold."""

from __future__ import annotations

from datetime import UTC, datetime

from tinkex.cli.commands.run import _info_table
from tinkex.types import RunWorker, TrainingRun


def test_a_run_is_shown_with_the_time_of_its_steps_and_its_workers() -> None:
    run = TrainingRun(
        training_run_id="a:train:0",
        base_model="toy",
        model_owner="local",
        is_lora=True,
        lora_rank=4,
        last_request_time=datetime.now(UTC),
        step_seconds={"compute": 1.5, "wait": 0.25, "reduce": 0.125, "transfer": 0.125},
        workers=[
            RunWorker(name="worker-1", utilisation=0.41, kv_bytes=2 << 30, adapter_bytes=1 << 20)
        ],
    )
    shown = dict(_info_table(run).rows)
    assert shown["Step Time"] == "2 s (compute 1.5, wait 0.25, reduce 0.125, transfer 0.125)"
    assert shown["Worker: worker-1"] == "busy 41%, KV cache 2.0 GB, adapters 1.0 MB"


def test_a_server_that_says_nothing_of_it_is_shown_without() -> None:
    run = TrainingRun(
        training_run_id="a",
        base_model="toy",
        model_owner="me",
        is_lora=True,
        last_request_time=datetime.now(UTC),
    )
    assert not [name for name, _ in _info_table(run).rows if name.startswith(("Step T", "Worker"))]

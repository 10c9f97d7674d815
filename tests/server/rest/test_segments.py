"""A run that was resumed is one run: one row, one curve, its checkpoints together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import store_rows as rows
from datums import datum

import tinkex
from tinkex import AdamParams
from tinkex.server.administration.disk_usage import disk_usage
from tinkex.server.runs.curves import Curve
from tinkex.server.runs.segments import joined
from tinkex.server.runs.states import SILENT_S, state_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


@pytest.fixture(scope="module")
def resumed(start_server, folder: Path) -> Iterator[tuple[str, list[str]]]:  # type: ignore[no-untyped-def]
    """A server, and the models of a run of six steps that was resumed after three and after four.

    Each segment goes one step too far, and loses it.
    """
    with start_server(folder, "--engine", "toy") as base_url:
        service = tinkex.ServiceClient(base_url=base_url, api_key="tml-x")
        training = service.create_lora_training_client("toy", rank=4, name="orders")
        ids, step = [training.model_id], 0
        for end in (3, 4, 6):
            training.save_state("begin").result()
            while step < end:
                step = train(training, step)
            path = training.save_state(f"step-{step}").result().path
            if end < 6:
                train(training, step)
                training = service.create_training_client_from_state_with_optimizer(
                    path, continues_at=step
                )
                ids.append(training.model_id)
        yield base_url, ids
        service.close().result()


def train(training: tinkex.TrainingClient, step: int) -> int:
    adam = AdamParams(learning_rate=0.01)
    training.train_step([datum([1, 2, 3])], "cross_entropy", adam).result()
    training.log_metrics({"reward": float(step)}, step=step).result()
    return step + 1


def test_a_resumed_run_is_one_row(resumed) -> None:  # type: ignore[no-untyped-def]
    base_url, ids = resumed
    rest = tinkex.RestClient(base_url=base_url, api_key="tml-x")
    listed = rest.list_training_runs().result()
    assert [run.training_run_id for run in listed.training_runs] == ids[-1:]
    assert listed.cursor.total_count == 1
    [run] = listed.training_runs
    assert (run.name, run.num_steps, run.reward) == ("orders", 6, 5.0)
    shown = httpx.get(f"{base_url}/console/api/runs").json()["runs"]
    assert [(row["run_id"], row["name"], row["steps"]) for row in shown] == [(ids[-1], "orders", 6)]


def test_its_segments_are_shown_with_the_step_each_began_at(resumed) -> None:  # type: ignore[no-untyped-def]
    base_url, ids = resumed
    rest = tinkex.RestClient(base_url=base_url, api_key="tml-x")
    run = rest.get_training_run(ids[-1]).result()
    assert run.segments is not None
    assert [(one.run_id, one.step) for one in run.segments] == list(
        zip(ids, (0, 3, 4), strict=True)
    )


def test_its_curve_has_every_step_once(resumed) -> None:  # type: ignore[no-untyped-def]
    """Whichever segment is asked for; what was lost between a save and the end is left out."""
    base_url, ids = resumed
    for run_id in ids:
        page = httpx.get(f"{base_url}/console/api/runs/{run_id}").json()
        curves = page["curves"]
        assert curves["reward"]["steps"] == [0, 1, 2, 3, 4, 5]
        assert curves["reward"]["values"] == [0, 1, 2, 3, 4, 5]
        assert curves["loss_per_token"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_its_last_checkpoint_is_that_of_its_last_segment(resumed) -> None:  # type: ignore[no-untyped-def]
    """Each segment has two of its own, and the page names the one to go on from."""
    base_url, ids = resumed
    rest = tinkex.RestClient(base_url=base_url, api_key="tml-x")
    [run] = rest.list_training_runs().result().training_runs
    last = f"tinker://{ids[-1]}/weights/step-6"
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == last
    of_name = rest.list_checkpoints("orders").result().checkpoints
    assert of_name == rest.list_checkpoints(ids[-1]).result().checkpoints
    assert last in [checkpoint.tinker_path for checkpoint in of_name]
    page = httpx.get(f"{base_url}/console/api/runs/{ids[-1]}").json()
    saved = [checkpoint["name"] for checkpoint in page["checkpoints"]]
    assert saved == ["step-6", "begin", "step-4", "begin", "step-3", "begin"]
    assert last in page["resume"]
    asked = httpx.get(f"{base_url}/v1/models/orders", headers={"Authorization": "Bearer tml-x"})
    assert asked.json()["path"] == last


def test_its_disk_usage_is_one_row(resumed, folder: Path) -> None:  # type: ignore[no-untyped-def]
    _, ids = resumed
    [run] = disk_usage(folder / "data" if (folder / "data").exists() else folder).runs
    assert (run.run_id, run.name, set(run.segment_ids)) == (ids[-1], "orders", set(ids[:-1]))


def test_a_segment_that_saved_nothing_is_cut_by_the_next_try() -> None:
    segments = [
        rows.model("a"),
        rows.model("b", continues="a", continues_step=2, first_step=2),
        rows.model("c", continues="a", continues_step=2, first_step=2),
    ]
    made = [
        {"reward": Curve(steps=list(steps), values=list(steps), moments=list(steps))}
        for steps in ((0.0, 1.0, 2.0), (2.0, 3.0), (2.0,))
    ]
    assert joined(segments, made)["reward"].steps == [0, 1, 2]


@pytest.mark.parametrize(
    ("status", "changes", "doing", "state"),
    [
        ({"type": "active"}, {}, "", "idle"),
        ({"type": "active"}, {}, "training", "running"),
        ({"type": "active"}, {}, "waiting for a worker", "waiting"),
        ({"type": "active"}, {"unloaded": True}, "", "finished"),
        ({"type": "active"}, {"corrupted": True}, "", "lost"),
        ({"type": "client_finished", "reason": {"type": "success"}}, {}, "", "finished"),
        ({"type": "client_finished", "reason": {"type": "interrupted"}}, {}, "", "stopped"),
        ({"type": "client_finished", "reason": {"type": "errored"}}, {}, "", "failed"),
    ],
)
def test_a_state_is_one_word_for_lists_and_pages(status, changes, doing, state) -> None:  # type: ignore[no-untyped-def]
    model, session = rows.model(**changes), rows.session(status=status)
    assert state_of(model, session, doing)[0] == state


def test_a_run_whose_program_left_without_a_word_is_finished() -> None:
    """A program of the official SDK that ends does not say so."""
    model, session = rows.model(), rows.session()
    assert state_of(model, session, "", time.time() + SILENT_S + 5)[0] == "finished"

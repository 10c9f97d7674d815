"""A run's folder: complete, exact on resume, and refusing to mix two runs."""

from __future__ import annotations

import json

import pytest

from tinkex.errors import ConfigError
from tinkex.runs.run_log import RunLog, SavedStep, make_trackers

CONFIG = {"model": "m", "rank": 8, "trackers": ()}


def test_a_resumed_log_forgets_steps_after_the_last_saved_state(tmp_path):
    log = RunLog(tmp_path, CONFIG)
    for step in range(7):
        log.metrics(step, {"loss": float(step)})
        if step == 3:
            log.saved(SavedStep(step=4, state_path="tinker://r/weights/a"))
    resumed = RunLog(tmp_path, CONFIG)
    assert resumed.last == SavedStep(step=4, state_path="tinker://r/weights/a")
    assert [line["step"] for line in resumed.read_metrics()] == [0, 1, 2, 3]


def test_a_folder_in_which_nothing_happened_takes_other_settings(tmp_path):
    RunLog(tmp_path, CONFIG)
    assert RunLog(tmp_path, {**CONFIG, "rank": 16}).last is None


def test_other_settings_are_refused_by_name(tmp_path):
    RunLog(tmp_path, CONFIG).metrics(0, {"loss": 1.0})
    with pytest.raises(ConfigError, match="rank=8, now 16"):
        RunLog(tmp_path, {**CONFIG, "rank": 16})
    RunLog(tmp_path, {**CONFIG, "rank": 16}, may_change=frozenset({"rank"}))


def test_every_difference_is_named_and_the_command_that_needs_none(tmp_path):
    RunLog(tmp_path, CONFIG).metrics(0, {"loss": 1.0})
    with pytest.raises(ConfigError) as refused:
        RunLog(tmp_path, {**CONFIG, "rank": 16, "seed": 7, "new": 1})
    for told in ("rank=8, now 16", "seed=", "now 7", "new=None, now 1", "tinkex train resume"):
        assert told in str(refused.value)


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    log = RunLog(tmp_path, CONFIG)
    log.saved(SavedStep(step=1, state_path="p"))
    with log.checkpoints_file.open("a") as file:
        file.write('{"step": 2, "state_')
    assert RunLog(tmp_path, CONFIG).last == SavedStep(step=1, state_path="p")


def test_trackers_see_every_metric(tmp_path):
    class Recorder:
        def __init__(self):
            self.seen = []

        def log(self, step, metrics):
            self.seen.append((step, dict(metrics)))

        def close(self):
            self.seen.append("closed")

    recorder = Recorder()
    log = RunLog(tmp_path, CONFIG, trackers=(recorder,))
    log.metrics(0, {"loss": 1.0})
    log.close()
    assert recorder.seen == [(0, {"loss": 1.0}), "closed"]


def test_an_unknown_or_missing_tracker_names_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="choose from wandb"):
        make_trackers(("visdom",), tmp_path, {})


def test_config_json_holds_the_settings(tmp_path):
    RunLog(tmp_path, CONFIG)
    assert json.loads((tmp_path / "config.json").read_text())["rank"] == 8

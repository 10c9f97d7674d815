"""The best checkpoint of a run, and stopping when nothing gets better."""

from __future__ import annotations

import pytest

from tinkex.errors import ConfigError
from tinkex.recipes.best import Watch
from tinkex.runs.run_log import RunLog, SavedStep

CONFIG = {"rank": 8}


def watch(folder, **settings):
    log = RunLog(folder, CONFIG)
    settings = {"mode": "min", "on_note": lambda text: None, **settings}
    return log, Watch(log, "held_out_loss", **settings)


def see(log, watching, values, start=0, saves=None):
    """Show values to a watch; each save is noted in the log as the real one does."""

    def save(step, *, for_sampler):
        saved = SavedStep(step=step, state_path=f"state-{step}", sampler_path=f"sampler-{step}")
        log.saved(saved)
        if saves is not None:
            saves.append(step)
        return saved

    ended = []
    for step, value in enumerate(values, start):
        metrics = {"held_out_loss": value}
        log.metrics(step, metrics)
        ended.append(watching.see(save, step, metrics))
    return ended


def test_every_improvement_is_kept_and_the_last_is_the_best(tmp_path):
    saves = []
    log, watching = watch(tmp_path, keep=True)
    assert not any(see(log, watching, [3.0, 2.0, 2.5, 1.0], saves=saves))
    assert saves == [0, 1, 3]
    assert (watching.best.step, watching.best.sampler_path) == (3, "sampler-3")


def test_nothing_is_saved_unless_asked_for(tmp_path):
    saves = []
    log, watching = watch(tmp_path)
    see(log, watching, [3.0, 2.0], saves=saves)
    assert saves == []
    assert (watching.best.step, watching.best.sampler_path) == (1, "")


def test_patience_counts_evaluations_without_an_improvement(tmp_path):
    notes = []
    log, watching = watch(tmp_path, patience=2, on_note=notes.append)
    assert see(log, watching, [3.0, 2.0, 2.1, 2.0]) == [False, False, False, True]
    assert "the best was 2 at step 1" in notes[0]
    assert watching.has_stopped(3)
    assert not watching.has_stopped(2)


def test_larger_is_better_for_a_reward(tmp_path):
    log, watching = watch(tmp_path, mode="max", stop_at=0.9)
    assert see(log, watching, [0.1, 0.5, 0.95]) == [False, False, True]
    assert watching.best.value == 0.95


def test_a_resumed_run_waits_no_longer_than_the_undisturbed_one(tmp_path):
    log, watching = watch(tmp_path, patience=3)
    see(log, watching, [2.0, 2.1, 2.2])
    log.saved(SavedStep(step=2, state_path="s"))  # and then it crashed: step 2 is measured again
    log, watching = watch(tmp_path, patience=3)
    assert watching.best.step == 0
    assert see(log, watching, [2.2, 2.3], start=2) == [False, True]


def test_a_best_after_the_checkpoint_it_resumes_from_is_forgotten(tmp_path):
    log, watching = watch(tmp_path)
    log.saved(SavedStep(step=1, state_path="s"))
    see(log, watching, [2.0, 1.5, 1.0])
    _, watching = watch(tmp_path)
    assert watching.best.step == 1


def test_a_negative_patience_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="patience must be at least 0"):
        watch(tmp_path, patience=-1)

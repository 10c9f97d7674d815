"""Plots: smoothed without a shift, held-out values as points, a terminal's in characters."""

from __future__ import annotations

import pytest

from tinkex.runs.plots import Panel, plot, smoothed, terminal_plot
from tinkex.runs.run_log import RunLog

LOSS = Panel(metrics={"loss": "training", "held_out_loss": "held out"}, label="loss")


def test_the_plot_is_a_png_beside_the_metrics(tmp_path):
    log = RunLog(tmp_path, {})
    assert plot(log, [LOSS], "t") is None
    for step in range(20):
        log.metrics(step, {"loss": 2.0 - step / 10, **({"held_out_loss": 1.0} if step % 5 else {})})
    target = plot(log, [LOSS, Panel(metrics={"kl": "KL"}, label="nats")], "t", "reward.png")
    assert target == tmp_path / "reward.png"
    assert target.read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_a_straight_line_and_the_ends():
    line = [float(i) for i in range(50)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([5.0]) == [5.0]
    noisy = [i % 2 for i in range(50)]
    inner = smoothed(noisy)[5:-5]
    assert max(inner) - min(inner) < 0.5


def test_a_terminal_plot_falls_where_the_values_fall():
    records = [{"step": step, "loss": 10.0 - step} for step in range(11)]
    drawn = terminal_plot(records, "loss", "Loss", width=11, height=11)
    rows = [line.partition("|")[2] for line in drawn.splitlines()[1:12]]
    assert [row.index("*") for row in rows] == list(range(11))
    assert drawn.splitlines()[0].strip() == "Loss (smoothed)"
    assert "step 10" in drawn


def test_one_point_is_no_plot():
    assert terminal_plot([{"step": 0, "loss": 1.0}], "loss", "Loss") == ""
    assert "*" in terminal_plot([{"step": s, "loss": 1.0} for s in range(3)], "loss", "Loss")


def test_few_points_are_drawn_as_they_are():
    records = [{"step": step, "reward": reward} for step, reward in enumerate((0.1, 0.9, 0.2))]
    drawn = terminal_plot(records, "reward", "Reward")
    assert drawn.splitlines()[0].strip() == "Reward"
    assert "0.9 |" in drawn

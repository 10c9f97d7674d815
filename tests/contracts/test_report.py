"""The judge of our benchmarks: what a ratio means, when a bar is missed, what is published."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def report() -> Any:
    spec = importlib.util.spec_from_file_location("bench_report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("ours", "peer", "unit", "bar", "ratio", "ok"),
    [
        (10.0, 20.0, "ms", 1.5, 2.0, True),
        (10.0, 20.0, "ms", 2.5, 2.0, False),
        (20.0, 10.0, "tokens/s", 1.5, 2.0, True),
        (10.0, 20.0, "tokens/s", 1.0, 0.5, False),
        (10.0, None, "ms", 12.0, None, True),
        (10.0, None, "tokens/s", 12.0, None, False),
        (10.0, 20.0, "ms", None, 2.0, True),
    ],
)
def test_a_ratio_says_how_many_times_better_ours_is(report, ours, peer, unit, bar, ratio, ok):
    figure = report.Figure(name="f", ours=ours, peer=peer, unit=unit, bar=bar)
    assert figure.ratio == ratio
    assert figure.ok is ok
    line = json.loads(figure.line())
    assert line["ratio"] == ratio
    assert line["ok"] is ok


def test_a_missed_bar_fails_unless_asked_not_to(report, capsys):
    figures = [report.Figure(name="slow", ours=2.0, peer=1.0, unit="ms", bar=1.0)]
    assert report.finish("wire", figures, []) == 1
    assert "slow" in capsys.readouterr().err
    assert report.finish("wire", figures, ["--no-bar"]) == 0


def test_a_table_is_rewritten_between_its_markers_and_nowhere_else(report, tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(
        "# Benchmarks\n\nprose\n\n<!-- bench:wire -->\nold\n<!-- /bench:wire -->\n\nend\n"
    )
    report.write("wire", "| new |", page)
    report.write("client", "| other |", page)
    text = page.read_text()
    assert "old" not in text
    assert "| new |" in text
    assert "| other |" in text
    assert text.startswith("# Benchmarks\n\nprose\n")
    assert "end\n" in text
    assert "commit" in text

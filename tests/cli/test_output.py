"""Sizes, times, JSON and tables."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tinkex.cli.listing import collect, counted
from tinkex.cli.output import Table, ago, plain, print_table, size, stacked

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "N/A"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (5 * 1024**3, "5.0 GB")],
)
def test_sizes_go_in_steps_of_1024(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        (timedelta(seconds=5), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(hours=5), "5 hours ago"),
        (timedelta(days=7), "7 days ago"),
        (timedelta(days=15), "2 weeks ago"),
        (timedelta(days=40), "2026-10-06"),
        (timedelta(days=-2), "in 2 days"),
    ],
)
def test_moments_read_as_distances(delta, text):
    assert ago(NOW - delta, now=NOW) == text


def test_json_shows_datetimes_as_python_does_and_billing_as_rfc_3339():
    assert plain({"t": NOW}) == {"t": "2026-11-15 12:00:00+00:00"}
    assert plain({"t": NOW}, rfc3339=True) == {"t": "2026-11-15T12:00:00Z"}


def test_a_long_cell_is_never_cut_in_a_pipe(capsys):
    long = "x" * 300
    print_table(Table(columns=("A",), rows=[(long,), (None,), (True,)]))
    out = capsys.readouterr().out
    assert long in out
    assert "N/A" in out
    assert "Yes" in out


def test_a_path_is_never_folded_on_a_narrow_terminal(monkeypatch, capsys):
    """One copies it from the screen; words beside it may fold."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    path = "tinker://" + "x" * 90
    print_table(Table(columns=("Path", "Note"), rows=[(path, "words " * 30)]))
    out = capsys.readouterr().out
    assert path in out
    assert max(map(len, out.splitlines())) < 200  # Styles count, too.


def test_properties_have_a_line_each_on_a_narrow_terminal(monkeypatch, capsys):
    """Blanks behind a short value were a second, empty line of a terminal of 80 columns."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = "tinker://" + "x" * 90
    print_table(Table(columns=("Property", "Value"), rows=[("Steps", 18), ("Sampler", path)]))
    lines = capsys.readouterr().out.splitlines()
    plain_lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert [line for line in plain_lines if len(line) > 80] == [f" Sampler    {path}"]
    assert [line for line in plain_lines if line != line.rstrip()] == []


def test_a_listing_without_rows_and_columns_still_says_so(capsys):
    print_table(Table(title="Usage (0)", columns=(), rows=[]))
    assert capsys.readouterr().out == "Usage (0)\n"


def test_pages_are_collected_until_the_limit_or_the_end():
    calls = []

    def fetch(limit, offset):
        calls.append((limit, offset))
        answer = SimpleNamespace(rows=list(range(25))[offset : offset + limit])
        return SimpleNamespace(result=lambda: answer)

    assert collect(fetch, "rows", limit=12, offset=3, page=10)[0] == list(range(3, 15))
    assert calls == [(10, 3), (2, 13)]
    assert collect(fetch, "rows", limit=0, offset=0, page=10)[0] == list(range(25))


def test_a_listing_says_how_many_there_are_when_it_shows_fewer():
    assert counted("Runs", [1, 2], 35) == "Runs (2 of 35)"
    assert counted("Runs", [1, 2], 2) == counted("Runs", [1, 2], None) == "Runs (2)"


def test_an_empty_table_is_its_title_and_columns(capsys):
    print_table(Table(title="Keys (0)", columns=("ID", "User"), rows=[]))
    shown = capsys.readouterr().out
    assert "Keys (0)" in shown
    assert "User" in shown


def test_text_is_shown_as_it_is(capsys):
    from tinkex.cli.progress import waiting

    print_table(Table(title="run x:train:0 [bold]", columns=("A",), rows=[(":train:",)]))
    with waiting("on :train:") as report:
        report("still :train:")
    captured = capsys.readouterr()
    assert "run x:train:0 [bold]" in captured.out
    assert captured.err == "on :train:\nstill :train:\n"


def test_how_far_a_model_is_loaded_is_said_on_stderr(capsys):
    from tinkex import events
    from tinkex.cli.progress import loading_shown

    def wait(reason: str) -> None:
        events.emit("queue.change", request_id="r", state="paused_capacity", reason=reason)

    with loading_shown():
        wait("loading org/Large-Model")
        wait("loading org/Large-Model 40 %")
        wait("3 requests ahead")
    wait("loading org/Large-Model 50 %")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Loading org/Large-Model 40 %\n")


def test_at_80_columns_ids_stand_whole_below_their_row():
    run_id = "cc89f186-afe2-4033-9086-ad988045f6db:train:0"
    columns = ["Name", "State", "Steps", "Loss", "Last Update", "Run ID"]
    row = ["pirate-with-a-long-name", "finished", "22", "0.008844", "19 minutes ago", run_id]
    lines = stacked(columns, [row, ["", *row[1:]]], [5])
    assert max(map(len, lines)) <= 80
    assert [line.strip() for line in lines].count(run_id) == 2
    assert lines[1].split() == ["Name", "State", "Steps", "Loss", "Last", "Update"]

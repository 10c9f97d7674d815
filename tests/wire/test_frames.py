"""Many results in one answer: what one side writes the other reads, and damage is refused."""

from __future__ import annotations

import pytest

from tinkex.errors import WireError
from tinkex.wire import frames


def written() -> bytes:
    made = frames.Writer()
    assert made.add("a", b"first")
    made.add_failure("b", "it broke", "server")
    assert made.add("c", bytes(frames.MAX_ITEM_BYTES + 1))
    assert made.add("d", b"last")
    return made.content(7, [])


def test_what_was_written_is_read():
    header, payloads = frames.read(written())
    assert header["cursor"] == 7
    assert [entry["request_id"] for entry in header["completions"]] == ["a", "b", "c", "d"]
    assert payloads == [b"first", None, None, b"last"]


def test_an_answer_without_results_says_why():
    header, payloads = frames.read(frames.Writer().content(3, [{"request_id": "x"}]))
    assert (header["waiting"], payloads) == ([{"request_id": "x"}], [])


def test_a_full_answer_takes_no_more():
    made = frames.Writer()
    payload = bytes(frames.MAX_ITEM_BYTES)
    taken = sum(made.add(str(number), payload) for number in range(40))
    assert taken == frames.MAX_BYTES // frames.MAX_ITEM_BYTES


@pytest.mark.parametrize("damage", [b"", b"\x05", written()[:-1], written() + b"x", b"\xff" * 40])
def test_damaged_frames_are_refused(damage):
    with pytest.raises(WireError):
        frames.read(damage)

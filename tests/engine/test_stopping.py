"""Stop strings are found wherever tokens end."""

from __future__ import annotations

import pytest

from tinkex.engine.sample.stopping import StopWatch

PIECES = [b"He", b"llo", b" wor", b"ld", b"\xe2\x82", b"\xac", b"!", b"</s>"]


def decode(tokens):
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def stop_after(tokens, *stops):
    watch = StopWatch(stops, decode)
    return next((i + 1 for i, token in enumerate(tokens) if watch.seen(token)), None)


@pytest.mark.parametrize(
    ("stop", "length"),
    [
        ("Hello", 2),
        ("o w", 3),
        ("ello world", 4),
        ("\u20ac", 6),  # A character of two tokens.
        ("ld\u20ac!", 7),
        ("</s>", 8),
        ("nothing", None),
    ],
)
def test_a_stop_is_seen_with_the_token_that_completes_it(stop, length):
    assert stop_after(range(8), stop) == length


def test_the_first_of_several_stops_counts():
    assert stop_after(range(8), "world", "lo") == 2


def test_half_a_character_is_not_a_replacement_character():
    assert stop_after([0, 4, 6], "\ufffd!") == 3
    assert stop_after([0, 4, 5], "\ufffd\ufffd") is None

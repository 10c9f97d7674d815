"""Tokens that come one by one give the text that they give together."""

from __future__ import annotations

import chat_models as models

from tinkex.chat.detokenizer import Detokenizer

TEXT = "Grüße, 世界! \U0001f600 done"


def test_no_half_character_is_given_out():
    tokenizer = models.tokenizer(None)
    stream = Detokenizer(tokenizer)
    parts = [stream.feed([token]) for token in tokenizer.encode(TEXT)]
    assert "".join(parts) == TEXT
    assert all("\ufffd" not in part for part in parts)


def test_what_ends_in_half_a_character_is_given_at_the_end():
    tokenizer = models.tokenizer(None)
    stream = Detokenizer(tokenizer)
    assert stream.feed(tokenizer.encode("世")[:2]) == ""
    assert stream.end() == "\ufffd"

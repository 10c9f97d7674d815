"""Text from tokens that arrive a few at a time.

A character may be spread over several tokens, and the first token of a text may decode otherwise
than the same token in its middle. So a text is decoded from a little before its new part, and
nothing is given out that ends in half a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer", "pieces_of"]

_HALF = "\ufffd"
MAX_BYTES = 4
"""Of a character; a token has one at least."""
MAX_WAITING = 16
"""Most tokens that wait for the end of a character."""


class Detokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before = 0  # where decoding starts: old enough to be whole
        self._given = 0  # tokens whose text was given out

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not given before."""
        self._tokens.extend(int(token) for token in tokens)
        text, end = self._new_text(), len(self._tokens)
        if text.endswith(_HALF):
            if end - self._given <= MAX_WAITING:
                return ""
            text, end = self._whole_part()
        self._before, self._given = self._given, end
        return text

    def _whole_part(self) -> tuple[str, int]:
        """The text before the half character at the end, and where it ends.

        A character has four bytes at most, so most of what waits is none. Of a model that writes
        nothing else, all would be decoded again for each of its tokens.
        """
        end = len(self._tokens)
        cuts = range(end - 1, end - MAX_BYTES - 1, -1)
        texts = ((self._new_text(cut), cut) for cut in cuts)
        whole = ((text, cut) for text, cut in texts if not text.endswith(_HALF))
        return next(whole, (self._new_text(cuts[-1]), cuts[-1]))

    def end(self) -> str:
        """The text that was held back, half characters included."""
        text = self._new_text()
        self._before = self._given = len(self._tokens)
        return text

    def _new_text(self, end: int | None = None) -> str:
        known = str(self._tokenizer.decode(self._tokens[self._before : self._given]))
        return str(self._tokenizer.decode(self._tokens[self._before : end]))[len(known) :]


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the whole.

    A token that ends inside a character has no text: the one that completes it has it all.
    """
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed([token]) for token in tokens]
    if pieces:
        pieces[-1] += detokenizer.end()
    return pieces

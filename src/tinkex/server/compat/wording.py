"""From tokens to the words a foreign API answers with: text cut at stop strings, tokens as text.

One `AnswerText` per answer. Whole answers and streams go through the same calls, so they say the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tinkex.chat.detokenizer import Detokenizer
from tinkex.chat.reading import Piece, PlainReader, Reader
from tinkex.server.compat.chat_formats import ChatFormat

__all__ = ["AnswerText", "num_thoughts", "token_bytes", "token_text"]


class AnswerText:
    """The text of one answer: decoded, without end token, cut at the first stop string, read.

    With `one_call` the answer is over with its first call of a tool; what the model went on to say
    is not part of it. `num_tokens` counts the tokens that are.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        reader: Reader | None,
        stops: Sequence[str] = (),
        *,
        one_call: bool = False,
    ) -> None:
        self.num_tokens = 0
        self._reader = reader or PlainReader()
        self._ends = chat_format.end_ids
        self._one_call = one_call
        self._has_called = False
        self._is_over = False
        # Plain text is what the model wrote, except its end.
        self._silent = chat_format.end_ids if reader is None else chat_format.silent_ids
        self._detokenizer = Detokenizer(chat_format.tokenizer)
        self._stops = [_Stop(stop) for stop in stops if stop]
        self._held = ""
        self._is_cut = False

    @property
    def is_thinking(self) -> bool:
        return self._reader.is_thinking

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        if not self._one_call:
            return self._feed(tokens)
        pieces: list[Piece] = []
        for token in tokens:
            if self._is_over:
                break
            if not self._has_called:
                pieces += self._first_call(self._feed([token]))
            else:
                self.num_tokens += token in self._ends  # it ends the turn that the call was
                self._is_over = True
        return pieces

    def _feed(self, tokens: Sequence[int]) -> list[Piece]:
        self.num_tokens += len(tokens)
        words = [token for token in tokens if token not in self._silent]
        return self._reader.feed(self._uncut(self._detokenizer.feed(words)))

    def _first_call(self, pieces: list[Piece]) -> list[Piece]:
        for index, piece in enumerate(pieces):
            if piece.call is not None:
                self._has_called = True
                return pieces[: index + 1]
        return pieces

    def end(self) -> list[Piece]:
        if self._has_called:
            return []
        rest = self._uncut(self._detokenizer.end())
        if not self._is_cut:
            rest += self._held
        pieces = [*self._reader.feed(rest), *self._reader.end()]
        return self._first_call(pieces) if self._one_call else pieces

    def _uncut(self, text: str) -> str:
        """The text that certainly stands before any stop string; the rest is held back."""
        if self._is_cut or not self._stops:
            return "" if self._is_cut else text
        before = len(self._held)
        self._held += text
        starts = [before + at for stop in self._stops if (at := stop.feed(text)) is not None]
        if starts:
            self._is_cut = True
            return self._held[: min(starts)]
        sure = len(self._held) - max(stop.num_matched for stop in self._stops)
        certain, self._held = self._held[:sure], self._held[sure:]
        return certain


def num_thoughts(answer_text: AnswerText, tokens: Sequence[int]) -> int:
    """How many of an answer's tokens are thoughts, the tags around them included."""
    count = 0
    for token in tokens:
        before = answer_text.is_thinking
        answer_text.feed([token])
        count += before or answer_text.is_thinking
    return count


class _Stop:
    """How much of one stop string the end of a text may be; each character is looked at once.

    Knuth, Morris and Pratt's search: comparing every possible overlap anew takes the product of
    the lengths for each token, and both belong to the caller.
    """

    __slots__ = ("_falls", "_text", "num_matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self._falls = _falls(text)
        self.num_matched = 0

    def feed(self, new: str) -> int | None:
        """Where the stop string begins in `new` (before it: less than 0); None: not yet said."""
        text, falls, matched = self._text, self._falls, self.num_matched
        at = 0
        while at < len(new):
            if not matched and (at := new.find(text[0], at)) < 0:
                break
            while matched and new[at] != text[matched]:
                matched = falls[matched - 1]
            matched += new[at] == text[matched]
            at += 1
            if matched == len(text):
                return at - matched
        self.num_matched = matched
        return None


@lru_cache(maxsize=1024)
def _falls(text: str) -> tuple[int, ...]:
    """For every beginning of `text`, how much of it is left when the next letter differs."""
    falls, matched = [0] * len(text), 0
    for at in range(1, len(text)):
        while matched and text[at] != text[matched]:
            matched = falls[matched - 1]
        matched += text[at] == text[matched]
        falls[at] = matched
    return tuple(falls)


def token_text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token]))


def token_bytes(tokenizer: Any, token: int) -> list[int]:
    """The bytes of a token, also of one that is half a character."""
    text = token_text(tokenizer, token)
    if "\ufffd" in text:
        piece = tokenizer.convert_ids_to_tokens(token) or ""
        if piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:-1], 16)]
        if all(letter in _BYTES for letter in piece):
            return [_BYTES[letter] for letter in piece]
    return list(text.encode())


def _byte_letters() -> dict[str, int]:
    """The letters with which byte-level tokenizers write bytes: printable ones as they are, the
    others moved up behind U+0100 in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    letters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return letters


_BYTES = _byte_letters()

"""From tokens to the words a foreign API answers with: text cut at stop strings, tokens as text.

One `Speaker` per answer. Whole answers and streams go through the same calls, so they say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinkex.chat.detokenizer import Detokenizer
from tinkex.chat.reading import Piece, PlainReader, Reader
from tinkex.server.compat.voices import Voice

__all__ = ["Speaker", "token_bytes", "token_text"]


class Speaker:
    """The text of one answer: decoded, without end token, cut at the first stop string, read."""

    def __init__(self, voice: Voice, reader: Reader | None, stops: Sequence[str] = ()) -> None:
        self._reader = reader or PlainReader()
        # Plain text is what the model wrote, except its end.
        self._silent = voice.end_ids if reader is None else voice.silent_ids
        self._detokenizer = Detokenizer(voice.tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._is_cut = False

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        words = [token for token in tokens if token not in self._silent]
        return self._reader.feed(self._uncut(self._detokenizer.feed(words)))

    def end(self) -> list[Piece]:
        rest = self._uncut(self._detokenizer.end())
        if not self._is_cut:
            rest += self._held
        return [*self._reader.feed(rest), *self._reader.end()]

    def _uncut(self, text: str) -> str:
        """What certainly stands before any stop string; the rest is held back."""
        if self._is_cut or not self._stops:
            return "" if self._is_cut else text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._is_cut = True
            return self._held[: min(found)]
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        certain, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return certain


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


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

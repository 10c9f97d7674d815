"""Notice when generated tokens spell a stop string, also across token borders.

The tokens up to and including the one that completes the stop string are the output, so the stop is
part of it once. Knows text and a decoder of tokens; the rest of sampling does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Detokenize = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"


def load_detokenizer(folder: Path) -> Detokenize:
    """How the tokenizer in a model folder turns ids into text, special tokens included."""
    if (path := folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(path))
        return lambda tokens: str(fast.decode(list(tokens), skip_special_tokens=False))
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder)
    return lambda tokens: str(slow.decode(list(tokens), skip_special_tokens=False))


class StopWatch:
    """Watches one sample. `seen(token)` is True once a stop string is complete."""

    def __init__(self, stops: Sequence[str], detokenize: Detokenize) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._detokenize = detokenize
        self._tail = ""
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        # Tokens not yet turned into text for good, behind some that give them their context:
        # many tokenizers drop or add a space at the start of what they decode.
        self._context: list[int] = []
        self._pending: list[int] = []

    def seen(self, token: int) -> bool:
        self._pending.append(token)
        before = self._detokenize(self._context)
        after = self._detokenize(self._context + self._pending)
        text = self._tail + after[len(before) :]
        # Only what is new can complete a stop, so each is looked for from there on: a request may
        # bring many of them, and every step of everybody waits for this.
        old = len(self._tail)
        found = any(text.find(stop, max(0, old + 1 - len(stop))) >= 0 for stop in self._stops)
        # A character whose bytes are still incomplete decodes differently once they are there.
        if not after.endswith(_BROKEN) or len(self._pending) > 8:
            self._tail = text[-self._keep :] if self._keep else ""
            self._context, self._pending = self._pending[-8:], []
        return found

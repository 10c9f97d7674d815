"""Text on stdout while a model is still writing it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tinkex.recipes.render import Renderer


class LiveText:
    """Shows text as its tokens come; a character of several tokens waits for its last one."""

    def __init__(self, renderer: Renderer, *, quiet: bool) -> None:
        self._renderer, self._quiet = renderer, quiet
        self._tokens: list[int] = []
        self._shown = ""

    @property
    def whole(self) -> str:
        return self._renderer.text(self._tokens)

    def add(self, tokens: Iterable[int]) -> None:
        self._tokens.extend(tokens)
        text = self.whole
        if not text.endswith("\ufffd") and text.startswith(self._shown):
            self._print(text[len(self._shown) :])
            self._shown = text

    def end(self) -> None:
        whole = self.whole
        self._print((whole[len(self._shown) :] if whole.startswith(self._shown) else "") + "\n")

    def _print(self, text: str) -> None:
        if not self._quiet:
            click.echo(text, nl=False)
            sys.stdout.flush()

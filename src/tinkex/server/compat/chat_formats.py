"""The tokenizer and chat template of each base model, loaded once and off the event loop."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tinkex.chat.renderer import ChatRenderer
from tinkex.chat.tokenizer import FastTokenizer
from tinkex.engine.jobs import ModelInfo
from tinkex.errors import InvalidInputError
from tinkex.server.fairness.gate import FairGate
from tinkex.server.process.problems import ApiError
from tinkex.server.sandbox.sandbox import Sandbox
from tinkex.server.workers.catalog import Catalog
from tinkex.store import User

T = TypeVar("T")
LARGE_AT_ONCE = 2
"""Large texts that are turned into tokens at a time."""
LARGE_TEXT = 16 * 1024
"""Characters from which a text is turned into tokens beside the event loop: some milliseconds."""
PIECE_CHARACTERS = 64 * 1024
CUT_TOKENS = 64
"""Most tokens that a text has more when it is cut in two."""
LOAD_S = 300.0
"""How long a first request waits for a model to be described; it may have to be fetched."""


class ChatFormat:
    """Tokenizer and chat template of one base model, and which of its tokens are no words."""

    def __init__(self, info: ModelInfo, conversation: ChatRenderer) -> None:
        self.info = info
        self.chat = conversation
        self.tokenizer: FastTokenizer = conversation.tokenizer
        self.end_ids = frozenset({*info.eos_token_ids, *conversation.end_ids})
        """What ends an answer: the model's own end tokens and those of its chat format."""
        ends = self.end_ids.difference(conversation.heard_ids)
        self.silent_ids = conversation.silent_ids | ends
        """What says nothing in a chat."""

    def within(self, info: ModelInfo) -> ChatFormat:
        """The same for a context of another length."""
        if info.max_context_length == self.info.max_context_length:
            return self
        return ChatFormat(info, self.chat)

    def rendered(self, text: str) -> array[int]:
        """The tokens of a conversation in the model's own format, as `tokens` gives them."""
        self._check_by_pieces(text)
        return array("i", self.chat.encode(text))

    def tokens(self, text: str) -> array[int]:
        """The tokens of a text.

        Raises:
            InvalidInputError: They are far too many for the model's context.
        """
        self._check_by_pieces(text)
        return array("i", self.tokenizer.encode(text))

    def _check_by_pieces(self, text: str) -> None:
        """Tokenizing takes 130 bytes for each character, 2 GB for a body's worth of text: what is
        far too long is counted piece by piece, until it is too much."""
        context = self.info.max_context_length
        if len(text) <= min(8 * context, 1_000_000):
            return
        num_tokens = 0
        for at in range(0, len(text), PIECE_CHARACTERS):
            piece = text[at : at + PIECE_CHARACTERS]
            num_tokens += max(len(self.tokenizer.encode(piece)) - CUT_TOKENS, 0)
            if num_tokens > context:
                raise InvalidInputError(
                    f"{len(text)} characters, whose first {at + len(piece)} alone are {num_tokens} "
                    f"tokens, exceed the context of {context} of {self.info.base_model}; "
                    "shorten it.",
                    path="prompt",
                )


class ChatFormats:
    def __init__(self, catalog: Catalog, sandbox: Sandbox) -> None:
        self._catalog = catalog
        self._sandbox = sandbox
        self._turns = FairGate(LARGE_AT_ONCE)
        self._loading: dict[str, asyncio.Task[ChatFormat]] = {}

    async def of(self, base_model: str) -> ChatFormat:
        name = self._catalog.resolve(base_model)
        task = self._loading.get(name)
        if task is None or (task.done() and task.exception() is not None):
            task = self._loading[name] = asyncio.create_task(self._load(name))
        # Others wait for the same task; a caller who goes away must not cancel it for them.
        chat_format = await asyncio.shield(task)
        info = await self._catalog.info(base_model)
        return chat_format if info is None else chat_format.within(info)

    async def aside(self, user: User, size: int, work: Callable[..., T], *args: Any) -> T:
        """Render or tokenize a text of so many characters beside the event loop.

        Megabytes take seconds of a core each: few at a time, fair between users.
        """
        async with self._turns.slot(user.user_id, size):
            return await asyncio.to_thread(work, *args)

    def sandboxed(self, user: User) -> Callable[..., str]:
        """`template.render` in the sandbox, in the turn of a user; to be called on a thread."""
        loop = asyncio.get_running_loop()

        def render(template: str, **facts: Any) -> str:
            job = self._sandbox.run(user.user_id, "render", {"template": template, **facts})
            rendered: str = asyncio.run_coroutine_threadsafe(job, loop).result()
            return rendered

        return render

    async def _load(self, name: str) -> ChatFormat:
        info = await self._catalog.info(name, timeout_s=LOAD_S)
        if info is None:
            raise ApiError(503, f"The server could not describe {name!r} in {LOAD_S:g} s.")
        return await asyncio.to_thread(_chat_format, info)


def _chat_format(info: ModelInfo) -> ChatFormat:
    folder = Path(info.tokenizer_id)
    if not (folder / "tokenizer.json").is_file():
        raise ApiError(
            501,
            f"{info.base_model!r} has no tokenizer.json on this server, so it cannot be asked in "
            "words. Use the Tinker API, which takes tokens.",
            code="no_tokenizer",
        )
    return ChatFormat(info, ChatRenderer(FastTokenizer.from_folder(folder)))

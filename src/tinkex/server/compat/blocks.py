"""Answers made of blocks, as Anthropic's messages and OpenAI's responses are: whole, or as events.

A block is a thought, a text or a call of a tool. The order in which blocks begin, grow and end is
the same in both dialects and is written here; what each event looks like is the dialect's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import Response

from tinkex.chat.messages import Message
from tinkex.chat.reading import Piece
from tinkex.server.compat import refusals, replies
from tinkex.server.compat.dialogue import Dialogue, ModelAnswer
from tinkex.types import SampleResponse


def pieces_of(message: Message) -> list[Piece]:
    """The blocks of a whole answer, a piece each; a text, though empty, where nothing else is."""
    pieces = [Piece("reasoning", message.reasoning)] if message.reasoning else []
    if message.content or not message.tool_calls:
        pieces.append(Piece("content", message.content))
    return pieces + [Piece("tool_call", call=call) for call in message.tool_calls]


class BlockAnswer(ABC):
    """An answered request. In a stream a block is `opened`, `grown` piece by piece, and `ended`."""

    failure: Callable[[Response], dict[str, Any]] = staticmethod(refusals.openai_error)

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue

    @abstractmethod
    def whole(self, answer: ModelAnswer, response: SampleResponse) -> dict[str, Any]:
        """The finished answer as one object."""

    @abstractmethod
    def begun(self) -> bytes:
        """The events that begin a stream."""

    @abstractmethod
    def opened(self, piece: Piece) -> bytes:
        """The events that begin a block, still without what is said in it."""

    @abstractmethod
    def grown(self, piece: Piece) -> bytes:
        """The event that adds to the last block."""

    @abstractmethod
    def ended(self) -> bytes:
        """The events that end the last block."""

    @abstractmethod
    def finished(self, answer: ModelAnswer, response: SampleResponse) -> bytes:
        """The events that end a stream."""

    async def reply(self, headers: Mapping[str, str], *, is_stream: bool) -> Response:
        if is_stream:
            return await replies.streamed(self.events(), headers, self.failure)
        response, answers = await self.dialogue.whole()
        return replies.whole(self.whole(answers[0], response), headers)

    async def events(self) -> AsyncIterator[bytes]:
        said = await replies.begun(self.dialogue.pieces())
        yield self.begun()
        open_kind = ""
        async for _, pieces, _ in said:
            for piece in pieces:
                # A call comes in one piece and is a block of its own, also behind another call.
                if open_kind and (piece.kind != open_kind or piece.call is not None):
                    yield self.ended()
                    open_kind = ""
                if not open_kind:
                    open_kind = piece.kind
                    yield self.opened(piece)
                yield self.grown(piece)
        if open_kind:
            yield self.ended()
        response, answers = await self.dialogue.result()
        yield self.finished(answers[0], response)

"""Conversations recorded to the token, so that what is trained is what the model saw and made.

With a trajectory id, every answer is kept: the prompt's tokens, the sampled ones, their logprobs
and the snapshot they came from. A later call whose messages go on from a recorded answer is built
on the recorded tokens, not on its text rendered and tokenised again: the prefix is identical token
for token, and its keys and values are still in the sampler's cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tinkex.chat.messages import Message
from tinkex.errors import InvalidInputError
from tinkex.server.compat.generation import Wish
from tinkex.server.compat.voices import Voice
from tinkex.server.files.checkpoints import Shelf
from tinkex.store import Store, TrajectoryAnswer, User
from tinkex.store.trajectories import MAX_ANSWERS, MAX_BYTES_PER_USER
from tinkex.types import SampleResponse

if TYPE_CHECKING:
    from tinkex.server.compat.dialogue import Answer, Asked

MAX_ID = 200


class Trajectories:
    def __init__(self, store: Store, shelf: Shelf) -> None:
        self._store = store
        self._shelf = shelf

    async def answers(self, user: User, trajectory_id: str) -> list[TrajectoryAnswer]:
        return await self._store.call(
            self._store.trajectories.of, user.user_id, check_id(trajectory_id)
        )

    async def prompt(self, user: User, asked: Asked, voice: Voice, text: str) -> list[int]:
        """The tokens of a prompt: recorded ones as far as they go, then those of what is new."""
        assert asked.trajectory is not None
        known = await self.answers(user, asked.trajectory)
        return await asyncio.to_thread(_prompt, asked, voice, text, known)

    async def record(
        self,
        user: User,
        asked: Asked,
        wish: Wish,
        response: SampleResponse,
        answers: Sequence[Answer],
    ) -> list[int]:
        """Keep the answers of a call.

        Raises:
            InvalidInputError: The user has recorded too much.
        """
        assert asked.trajectory is not None
        store = self._store.trajectories
        known = await self.answers(user, asked.trajectory)
        size = await self._store.call(store.size_of_user, user.user_id)
        if len(known) + len(answers) > MAX_ANSWERS or size > MAX_BYTES_PER_USER:
            raise InvalidInputError(
                f"a trajectory holds at most {MAX_ANSWERS} answers and a user's together at most "
                f"{MAX_BYTES_PER_USER} bytes; delete some with "
                "DELETE /api/v1/trajectories/ID.",
                path="trajectory",
            )
        parent, _ = _parent(asked.messages, known)
        start = len(tokens_of(parent, known)) if parent else 0
        snapshot = ""
        if wish.target.model_path is not None:
            snapshot = (await self._shelf.readable(wish.target.model_path, user)).folder
        rows = [
            TrajectoryAnswer(
                user_id=user.user_id,
                trajectory_id=asked.trajectory,
                parent_id=parent.answer_id if parent else None,
                history=_digests([*asked.messages, answer.message])[-1],
                prompt_tokens=_ints(wish.prompt[start:]),
                tokens=_ints(answer.sequence.tokens),
                logprobs=np.asarray(answer.sequence.logprobs, "<f4").tobytes(),
                stop_reason=str(answer.sequence.stop_reason),
                model=wish.target.name,
                snapshot=snapshot.rpartition("/")[2],
                created_at=time.time(),
            )
            for answer in answers
        ]
        return await self._store.call(store.add, rows)


def check_id(trajectory_id: str) -> str:
    if not 1 <= len(trajectory_id) <= MAX_ID or not trajectory_id.isprintable():
        raise InvalidInputError(
            f"must be 1 to {MAX_ID} printable characters, got {trajectory_id[:40]!r}",
            path="trajectory",
        )
    return trajectory_id


def tokens_of(answer: TrajectoryAnswer, known: Sequence[TrajectoryAnswer]) -> list[int]:
    """Everything up to and including an answer, from the first prompt on."""
    by_id = {one.answer_id: one for one in known}
    parts: list[bytes] = []
    at: TrajectoryAnswer | None = answer
    while at is not None:
        parts += [at.tokens, at.prompt_tokens]
        at = by_id[at.parent_id] if at.parent_id is not None else None
    return [int(token) for token in np.frombuffer(b"".join(reversed(parts)), "<i4")]


def _prompt(asked: Asked, voice: Voice, text: str, known: Sequence[TrajectoryAnswer]) -> list[int]:
    answer, length = _parent(asked.messages, known)
    if answer is None:
        return voice.chat.encode(text)
    return [*tokens_of(answer, known), *voice.chat.encode(_rest(asked, voice, length, answer))]


def _parent(
    messages: Sequence[Message], known: Sequence[TrajectoryAnswer]
) -> tuple[TrajectoryAnswer | None, int]:
    """The longest recorded conversation that these messages go on from; how many they share."""
    latest = {answer.history: answer for answer in known}
    for length, digest in reversed(list(enumerate(_digests(messages), 1))):
        if messages[length - 1].role == "assistant" and digest in latest:
            return latest[digest], length
    return None, 0


def _rest(asked: Asked, voice: Voice, length: int, answer: TrajectoryAnswer) -> str:
    """What the template writes after a recorded answer: the end of its turn, and the new turns.

    Thoughts are left out on both sides, because templates drop those of earlier turns; what they
    write between turns does not depend on them.
    """
    messages = [_without_thoughts(message) for message in asked.messages]
    chat = voice.chat
    before = chat.text(messages[: length - 1], asked.tools, generate=True, **asked.options)
    said = chat.text(messages[:length], asked.tools, **asked.options)
    everything = chat.text(messages, asked.tools, generate=True, **asked.options)
    if not (said.startswith(before) and everything.startswith(said)):
        raise InvalidInputError(
            "the model's chat template rewrites earlier turns when a later one is added, so a "
            "conversation cannot go on from its recorded tokens; send it without a trajectory.",
            path="trajectory",
        )
    end = chat.end_text
    position = said.rfind(end) if end else -1
    after_words = position if position >= len(before) else len(said)
    if answer.stop_reason == "stop" and after_words < len(said):
        after_words += len(end)  # the sampled tokens end with it
    return everything[after_words:]


def _without_thoughts(message: Message) -> Message:
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """For every beginning of a conversation, what it has in common with one that reads the same.

    Thoughts are left out, since most clients do not send them back, and so are the ids of calls,
    which some invent anew.
    """
    made: list[bytes] = []
    before = b""
    for message in messages:
        calls = [(call.name, call.parsed()) for call in message.tool_calls]
        said: list[Any] = [message.role, message.content, calls]
        text = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
        before = hashlib.blake2b(before + text, digest_size=16).digest()
        made.append(before)
    return made


def _ints(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()

"""Conversations recorded to the token, so that what is trained is what the model saw and made.

With a trajectory id, every answer is kept: the prompt's tokens, the sampled ones, their logprobs
and the snapshot they came from. A later call whose messages go on from a recorded answer is built
on the recorded tokens, not on its text rendered and tokenised again: the prefix is identical token
for token, and its keys and values are still in the sampler's cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from fastapi import Request

from tinkex.chat.messages import Message
from tinkex.chat.template import render
from tinkex.errors import InvalidInputError
from tinkex.server.compat.chat_formats import ChatFormat, ChatFormats
from tinkex.server.compat.running_sample import SampleSpec
from tinkex.server.files.checkpoints import Shelf
from tinkex.store import Store, TrajectoryAnswer, User
from tinkex.store.trajectories import MAX_ANSWERS, MAX_BYTES, MAX_BYTES_PER_USER

if TYPE_CHECKING:
    from tinkex.server.compat.dialogue import Asked, ModelAnswer

MAX_ID = 200
HEADER = "x-tinkex-trajectory"


@dataclass(frozen=True, slots=True)
class RecordedPrefix:
    """A prompt, and the recorded answer that it goes on from."""

    text: str
    prompt: Sequence[int]
    parent_id: int | None = None
    num_known: int = 0
    """How many tokens of the prompt are recorded already."""


class TrajectoryRecorder:
    def __init__(self, store: Store, shelf: Shelf) -> None:
        self._store = store
        self._shelf = shelf

    async def answers(self, user: User, trajectory_id: str) -> list[TrajectoryAnswer]:
        return await self._store.call(
            self._store.trajectories.of, user.user_id, check_id(trajectory_id)
        )

    async def open(
        self, user: User, asked: Asked, chat_format: ChatFormat, chat_formats: ChatFormats
    ) -> RecordedPrefix:
        """The tokens of a prompt: recorded ones as far as they go, then those of what is new.

        Raises:
            InvalidInputError: The user has recorded too much, or the template refuses.
        """
        assert asked.trajectory is not None
        kept, trajectory_id = self._store.trajectories, check_id(asked.trajectory)
        self._shelf.disk_quota.require(user.user_id)
        num_answers, size = await self._store.call(kept.extent, user.user_id, trajectory_id)
        total = self._store.stored.of(user.user_id)["trajectories"]
        if (
            num_answers + asked.num_answers > MAX_ANSWERS
            or size > MAX_BYTES
            or total > MAX_BYTES_PER_USER
        ):
            raise InvalidInputError(
                f"a trajectory holds at most {MAX_ANSWERS} answers and {MAX_BYTES} bytes, a user's "
                f"together at most {MAX_BYTES_PER_USER} bytes; begin another, or delete some with "
                "DELETE /api/v1/trajectories/ID.",
                path="trajectory",
            )
        known = await self.answers(user, trajectory_id)
        render = chat_formats.sandboxed(user)
        return await chat_formats.aside(
            user, size + asked.num_characters, _recording, asked, chat_format, known, render
        )

    async def record(
        self,
        user: User,
        asked: Asked,
        spec: SampleSpec,
        recording: RecordedPrefix,
        answers: Sequence[ModelAnswer],
    ) -> list[int]:
        """Keep the answers of a call, as followers of the answer that its prompt was built on.

        Raises:
            OverQuotaError: The user has no room for them any more.
        """
        assert asked.trajectory is not None
        snapshot = ""
        if spec.target.model_path is not None:
            snapshot = (await self._shelf.readable(spec.target.model_path, user)).folder
        # Of every answer the whole conversation is read again.
        histories = await asyncio.to_thread(
            lambda: [_digests(asked, answer.message)[-1] for answer in answers]
        )
        rows = [
            TrajectoryAnswer(
                user_id=user.user_id,
                trajectory_id=asked.trajectory,
                parent_id=recording.parent_id,
                history=history,
                prompt_tokens=_ints(recording.prompt[recording.num_known :]),
                tokens=_ints(answer.sequence.tokens),
                logprobs=np.asarray(answer.sequence.logprobs, "<f4").tobytes(),
                stop_reason=str(answer.sequence.stop_reason),
                model=spec.target.name,
                snapshot=snapshot.rpartition("/")[2],
                created_at=time.time(),
            )
            for answer, history in zip(answers, histories, strict=True)
        ]
        size = sum(row.num_bytes for row in rows)
        # Judged again: many that were let in together know their size only now.
        name = f"trajectory {secrets.token_hex(8)}"
        with self._shelf.disk_quota.admitted(name, user.user_id, size):
            return await self._store.call(self._store.trajectories.add, rows)


def trajectory_of(given: str | None, request: Request) -> str | None:
    """The id in the body, else in the header: some tools can set only one of them.

    Raises:
        InvalidInputError: It is not an id.
    """
    trajectory_id = given if given is not None else request.headers.get(HEADER)
    return None if trajectory_id is None else check_id(trajectory_id)


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
    turn: TrajectoryAnswer | None = answer
    while turn is not None:
        parts += [turn.tokens, turn.prompt_tokens]
        turn = by_id[turn.parent_id] if turn.parent_id is not None else None
    return [int(token) for token in np.frombuffer(b"".join(reversed(parts)), "<i4")]


def fresh(
    asked: Asked,
    chat_format: ChatFormat,
    render: Callable[..., str] = render,
    **limits: float,
) -> RecordedPrefix:
    """A prompt that goes on from nothing."""
    options = {**asked.options, **limits}
    text = chat_format.chat.text(
        asked.messages, asked.tools, generate=True, render=render, **options
    )
    return RecordedPrefix(text, chat_format.rendered(text))


def _recording(
    asked: Asked,
    chat_format: ChatFormat,
    known: Sequence[TrajectoryAnswer],
    render: Callable[..., str],
) -> RecordedPrefix:
    answer, length = _parent(asked, known)
    if answer is None:
        return fresh(asked, chat_format, render)
    before = tokens_of(answer, known)
    chat = chat_format.chat
    text = chat.text_after(
        length - 1,
        asked.messages,
        asked.tools,
        is_ended=before[-1] in chat.end_ids,
        render=render,
        **asked.options,
    )
    prompt = array("i", [*before, *chat_format.rendered(text)])
    return RecordedPrefix(text, prompt, answer.answer_id, len(before))


def _parent(asked: Asked, known: Sequence[TrajectoryAnswer]) -> tuple[TrajectoryAnswer | None, int]:
    """The longest recorded conversation that a call goes on from; how many messages they share."""
    latest = {answer.history: answer for answer in known}
    for length, digest in reversed(list(enumerate(_digests(asked), 1))):
        if asked.messages[length - 1].role == "assistant" and digest in latest:
            return latest[digest], length
    return None, 0


def _digests(asked: Asked, *answers: Message) -> list[bytes]:
    """For every beginning of a conversation, what it has in common with one that reads the same.

    Thoughts are left out, since most clients do not send them back, and so are the ids of calls,
    which some invent anew. Tools stand in the prompt, so other tools are another conversation.
    """
    digests: list[bytes] = []
    before = orjson.dumps([t.for_template() for t in asked.tools], option=orjson.OPT_SORT_KEYS)
    for message in (*asked.messages, *answers):
        calls = [(call.name, call.parsed()) for call in message.tool_calls]
        turn: list[Any] = [message.role, message.content, calls]
        before = hashlib.blake2b(before + _spelled(turn), digest_size=16).digest()
        digests.append(before)
    return digests


def _spelled(said: list[Any]) -> bytes:
    """A turn in a single spelling."""
    try:
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a number beyond 64 bits, which JSON may have
        return json.dumps(said, sort_keys=True).encode()


def _ints(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()

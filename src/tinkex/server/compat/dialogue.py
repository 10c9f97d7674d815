"""A turn of a conversation in nobody's dialect: what OpenAI's and Anthropic's routes share.

Opening a dialogue finds the weights, renders the prompt and checks it; then the answer is taken
whole or as pieces while it is made. Both go through one `AnswerText` per answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import Field

from tinkex.chat.messages import Message, Tool, ToolCall
from tinkex.chat.reading import Piece, joined
from tinkex.chat.template import TooLongError
from tinkex.contract.cost import Cost
from tinkex.errors import InvalidInputError
from tinkex.server.compat import fields
from tinkex.server.compat.chat_formats import LARGE_TEXT, ChatFormat, ChatFormats
from tinkex.server.compat.dependencies import compat_of
from tinkex.server.compat.fields import SamplingFields
from tinkex.server.compat.model_names import SampleTarget
from tinkex.server.compat.running_sample import NewTokens, RunningSample, SampleSpec
from tinkex.server.compat.trajectories import (
    MAX_ID,
    RecordedPrefix,
    TrajectoryRecorder,
    fresh,
    trajectory_of,
)
from tinkex.server.compat.wording import AnswerText, num_thoughts
from tinkex.server.http.bodies import is_parsed_held, let_go_parsed
from tinkex.server.http.dependencies import service_of
from tinkex.server.process.off_loop import off_loop
from tinkex.store import User
from tinkex.types import SampledSequence, SampleResponse, TopkLogprobs
from tinkex.wire.budget import json_cost, quick_json_cost

T = TypeVar("T")
C = TypeVar("C", bound="Conversing")
TOKEN_BYTES = 64
"""Of an answer, for each token and each of its likeliest."""
MOMENT_S = 0.01
"""How long a chat template may hold up the event loop."""
PART_CHARACTERS = 128
"""What a message or a call costs beside its text, in characters."""
_PARTS, _CALLS = "parts of content", "calls of tools"
_LISTS = (
    ("content", _PARTS, fields.MAX_PARTS),
    ("output", _PARTS, fields.MAX_PARTS),
    ("tool_calls", _CALLS, fields.MAX_CALLS),
)
"""The lists in a message, of all dialects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    model: str
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template reads besides, such as `enable_thinking`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters, without what ends the answer."""
    stops: Sequence[str] = ()
    num_answers: int = 1
    topk: int = 0
    keep_reasoning: bool = False
    """Thoughts stay in the content."""
    one_call: bool = False
    """An answer ends with its first call of a tool."""
    trajectory: str | None = None

    @property
    def num_characters(self) -> int:
        """Of what is said and printed; calls of functions and options count, and every part."""
        calls = [call for message in self.messages for call in message.tool_calls]
        texts = [part for m in self.messages for part in (m.content, m.reasoning)]
        texts += [text for call in calls for text in (call.name, call.arguments)]
        texts += [str(value) for value in self.options.values()]
        return sum(map(len, texts)) + PART_CHARACTERS * (len(self.messages) + len(calls))

    def check_calls(self) -> None:
        """Refuse too many calls of tools, and arguments that are too much JSON to parse.

        Raises:
            InvalidInputError: With the count and the limit.
        """
        calls: list[ToolCall] = []
        for index, message in enumerate(self.messages):
            path = f"messages[{index}].tool_calls"
            fields.at_most(len(message.tool_calls), fields.MAX_CALLS, "calls in a message", path)
            calls += message.tool_calls
        fields.at_most(len(calls), fields.MAX_ALL_CALLS, "calls of tools in all", "messages")
        texts = [call.arguments.encode("utf-8", "surrogatepass") for call in calls]
        if exceeded := _together(map(quick_json_cost, texts)):
            exceeded = _together(map(json_cost, texts))
        if exceeded:
            raise InvalidInputError(
                f"the arguments of the calls have {exceeded}; leave out earlier calls, or send "
                "large arguments as texts",
                path="messages.tool_calls",
            )

    def without_words(self) -> Asked:
        """The call without its messages: enough to read the answer by, once the prompt is made."""
        return replace(self, messages=(), tools=[tool.outline() for tool in self.tools])


def _together(costs: Iterable[Cost]) -> str:
    """Which limit the arguments of all calls exceed, in words; empty when none."""
    return fields.CONVERSATION.exceeded(sum(costs, Cost()))


class Conversing(SamplingFields):
    """A body with a conversation, in any dialect."""

    turns: ClassVar[str] = "messages"
    """The field that has the messages."""
    trajectory: Annotated[str, Field(max_length=MAX_ID)] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        turns, tools = body.get(cls.turns), body.get("tools")
        if isinstance(tools, list):
            fields.at_most(len(tools), fields.MAX_TOOLS, "tools", "tools")
        if not isinstance(turns, list):
            return
        fields.at_most(len(turns), fields.MAX_MESSAGES, "messages", cls.turns)
        in_all: Counter[str] = Counter()
        for index, turn in enumerate(turns):
            for name, what, most in _LISTS if isinstance(turn, dict) else ():
                if isinstance(listed := turn.get(name), list):
                    fields.at_most(len(listed), most, what, f"{cls.turns}[{index}].{name}")
                    in_all[what] += len(listed)
        fields.at_most(in_all[_PARTS], fields.MAX_ALL_PARTS, f"{_PARTS} in all", cls.turns)
        fields.at_most(in_all[_CALLS], fields.MAX_ALL_CALLS, f"{_CALLS} in all", cls.turns)

    def asked(self) -> Asked:
        """The call in nobody's dialect; refuses what cannot be had."""
        raise NotImplementedError

    def option_fields(self) -> Mapping[str, str]:
        """The fields that options of the chat template came from, where their names differ."""
        return {}


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    message: Message
    finish: str
    """`stop`, `length` or `tool_calls`."""
    sequence: SampledSequence
    num_thoughts: int
    """Tokens of it that were thoughts, read apart from the content."""


async def find_model(request: Request, user: User, name: str) -> tuple[SampleTarget, ChatFormat]:
    """The weights behind a name, and how to talk to them."""
    compat = compat_of(request)
    target = await compat.names.target(user, name)
    return target, await compat.chat_formats.of(target.base_model)


async def _fresh(
    asked: Asked, chat_format: ChatFormat, chat_formats: ChatFormats, user: User
) -> RecordedPrefix:
    """Here when it is a matter of a moment, which most are: a thread costs more than that."""
    size = asked.num_characters
    if size < LARGE_TEXT and not asked.tools:
        with suppress(TooLongError):
            return fresh(asked, chat_format, max_seconds=MOMENT_S)
    render = chat_formats.sandboxed(user)
    return await chat_formats.aside(user, size, fresh, asked, chat_format, render)


@dataclass(slots=True)
class Dialogue:
    asked: Asked
    chat_format: ChatFormat
    recording: RecordedPrefix
    generation: RunningSample
    trajectories: TrajectoryRecorder

    @classmethod
    async def open(cls, request: Request, user: User, asked: Asked) -> Dialogue:
        """Find the weights and render the prompt.

        Raises:
            ApiError, InvalidInputError: The request cannot be honoured.
        """
        compat = compat_of(request)
        target, chat_format = await find_model(request, user, asked.model)
        if asked.trajectory is None:
            recording = await _fresh(asked, chat_format, compat.chat_formats, user)
        else:
            recording = await compat.trajectories.open(
                user, asked, chat_format, compat.chat_formats
            )
        spec = SampleSpec(
            target=target,
            info=chat_format.info,
            prompt=recording.prompt,
            params={**asked.params, "stop": [*sorted(chat_format.end_ids), *asked.stops]},
            num_samples=asked.num_answers,
            topk_sample=asked.topk,
        )
        generation = RunningSample(service_of(request), user, spec, request)
        return cls(asked, chat_format, recording, generation, compat.trajectories)

    @property
    def prompt(self) -> Sequence[int]:
        return self.recording.prompt

    def answer_text(self) -> AnswerText:
        reader = self.chat_format.chat.reader(
            self.recording.text,
            calls=bool(self.asked.tools),
            thinking=not self.asked.keep_reasoning,
            tools=self.asked.tools,
        )
        return AnswerText(self.chat_format, reader, self.asked.stops, one_call=self.asked.one_call)

    async def whole(self) -> tuple[SampleResponse, list[ModelAnswer]]:
        response = await self.generation.whole()
        return response, await self._answers(response)

    async def off_loop(self, response: SampleResponse, work: Callable[..., T], *args: Any) -> T:
        """Put an answer into words: here, or on a thread where there are many."""
        num_tokens = sum(len(sequence.tokens) for sequence in response.sequences)
        return await off_loop(num_tokens * (1 + self.asked.topk) * TOKEN_BYTES, work, *args)

    async def pieces(self) -> AsyncIterator[tuple[int, list[Piece], NewTokens]]:
        """Pieces of the answers while they are made; `result` gives the whole when this ends."""
        speakers = [self.answer_text() for _ in range(self.asked.num_answers)]
        async for new in self.generation.tokens():
            answer_text = speakers[new.index]
            before = answer_text.num_tokens
            pieces = answer_text.feed(new.tokens)
            yield new.index, pieces, new.first(answer_text.num_tokens - before)
        for index, answer_text in enumerate(speakers):
            yield index, answer_text.end(), NewTokens(index, [], [])

    async def result(self) -> tuple[SampleResponse, list[ModelAnswer]]:
        response = self.generation.result
        assert response is not None
        return response, await self._answers(response)

    async def _answers(self, response: SampleResponse) -> list[ModelAnswer]:
        answers = await self.off_loop(response, self._read, response)
        if self.asked.trajectory is not None:
            await self.trajectories.record(
                self.generation.user, self.asked, self.generation.spec, self.recording, answers
            )
        return answers

    def _read(self, response: SampleResponse) -> list[ModelAnswer]:
        return [self._answer(sequence) for sequence in response.sequences]

    def _answer(self, sequence: SampledSequence) -> ModelAnswer:
        answer_text = self.answer_text()
        message = joined([*answer_text.feed(sequence.tokens), *answer_text.end()])
        finish = "stop" if sequence.stop_reason == "stop" else "length"
        if answer_text.num_tokens < len(sequence.tokens):
            sequence = _cut(sequence, answer_text.num_tokens)
        thoughts = num_thoughts(self.answer_text(), sequence.tokens) if message.reasoning else 0
        return ModelAnswer(
            message, "tool_calls" if message.tool_calls else finish, sequence, thoughts
        )


def _cut(sequence: SampledSequence, num_tokens: int) -> SampledSequence:
    """The beginning of a sequence that the model carried on."""
    topk = sequence.topk_logprobs_np
    if topk is not None:
        topk = TopkLogprobs.wrap(topk.token_ids[:num_tokens], topk.logprobs[:num_tokens])
    return SampledSequence(
        "stop",
        sequence.sequence_id,
        sequence.tokens_np[:num_tokens],
        None if sequence.logprobs_np is None else sequence.logprobs_np[:num_tokens],
        topk,
    )


async def converse(
    request: Request, user: User, kind: type[C]
) -> tuple[C, Dialogue, dict[str, str]]:
    """Read a call and open its dialogue; with the headers of the answer.

    They name what does nothing, wishes that this model's template does not know among it.
    """
    body, asked, ignored = await fields.read(request, kind, understood)
    trajectory = trajectory_of(body.trajectory, request)
    dialogue = await Dialogue.open(request, user, replace(asked, trajectory=trajectory))
    names = body.option_fields()
    unread = dialogue.chat_format.chat.unread(dialogue.asked.options)
    if trajectory is None and is_parsed_held(request.scope):
        # The sample may take minutes: meanwhile others use the room of what was parsed.
        body, dialogue.asked = body.lean(), dialogue.asked.without_words()
        let_go_parsed(request.scope)
    return body, dialogue, fields.header_of([*ignored, *(names.get(n, n) for n in unread)])


def understood(body: C) -> tuple[C, Asked, list[str]]:
    """A body with what it asks for, and which of its fields do nothing."""
    asked = body.asked()
    asked.check_calls()
    return body, asked, body.ignored()

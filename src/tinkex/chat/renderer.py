"""One model's way of having a conversation: messages to tokens, and its answers back to messages.

The tokenizer's own chat template decides how a conversation reads. A tokenizer without one gets
ChatML where it has those tokens, else plain `User:` and `Assistant:` turns. What a template does
not know (tools, calls, reasoning) is written into the text in the family's own form: a tool that
was asked for is never left out in silence.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from tinkex.chat.families import GENERIC, ChatFamily, Listening, family_of
from tinkex.chat.messages import ROLES, Message, Tool
from tinkex.chat.reading import PlainReader, Reader, whole
from tinkex.chat.template import render
from tinkex.errors import InvalidInputError

__all__ = ["ChatRenderer"]

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\\n' + m.content }}<|im_end|>\\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
).replace("\\n", "\n")
_PLAIN = (
    "{% for m in messages %}{{ m.role.capitalize() + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}"
    "{% elif messages and messages[-1].role == 'assistant' %}{{ 'User:' }}{% endif %}"
)
_PLAIN_END = "\nUser:"
_TOOLS = (
    "You may call functions. To call some, answer with a JSON list of objects with a name and "
    "arguments, between <tool_call> and </tool_call>:\n"
    '<tool_call>\n[{"name": NAME, "arguments": {...}}]\n</tool_call>\n'
    "The functions:\n<tools>\n%s\n</tools>"
)


class ChatRenderer:
    """Renders and reads for one tokenizer: of `tokenizers` (ours) or of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        own = getattr(tokenizer, "chat_template", None)
        self._is_plain = own is None and "<|im_end|>" not in self._control
        self._template: str = own or (_PLAIN if self._is_plain else _CHATML)
        self.family: ChatFamily = GENERIC if self._is_plain else family_of(self._template)
        self._special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if isinstance(token := getattr(tokenizer, name, None), str)
        }

    def unread(self, options: Iterable[str]) -> set[str]:
        """The given options that this model's template does not read."""
        return {name for name in options if name not in self._template}

    # ------------------------------------------------------------------------ out

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generate: bool = False,
        num_known: int = 0,
        render: Callable[..., str] = render,
        **options: Any,
    ) -> str:
        """The conversation as the model reads it.

        Args:
            generate: End where the assistant begins to speak.
            render: Does the work of `template.render`, here or in another process.
            num_known: So many messages were looked at before, or were said by the model itself;
                whatever a model spells, the conversation may go on.
            options: What the template reads besides, such as `enable_thinking`.

        Raises:
            InvalidInputError: A role is unknown, a text holds a control token, or the template
                refuses.
        """
        self._check(messages, num_known)
        # A template that knows no tools, or no thoughts, gets them as text of the messages.
        worded = self._in_words(messages, tools)
        knows_tools = "tools" in self._template
        return render(
            self._template,
            messages=[message.for_template() for message in worded],
            tools=[tool.for_template() for tool in tools] if knows_tools else None,
            special_tokens=self._special,
            add_generation_prompt=generate,
            **options,
        )

    def text_after(
        self,
        index: int,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        is_ended: bool,
        **options: Any,
    ) -> str:
        """The text that the template puts between an assistant's turn and its next one.

        For a conversation that goes on from recorded tokens. A mark stands in for the turn's words,
        so it does not matter that templates rewrite earlier turns, or leave their thoughts out.

        Args:
            index: Of the turn in `messages`. What stands before it is not looked at again: a model
                may have spelled a control token, and the conversation goes on all the same.
            is_ended: Whether the recorded tokens hold the token that ends the turn.

        Raises:
            InvalidInputError: The template does not write the turn, or refuses.
        """
        mark = secrets.token_hex(16)
        told = [*messages[:index], _marked(messages[index], mark), *messages[index + 1 :]]
        text = self.text(told, tools, generate=True, num_known=index + 1, **options)
        _, found, rest = text.rpartition(mark)
        ends = [(at, end) for end in self._closings() if (at := rest.find(end)) >= 0]
        if not found or not ends:
            raise InvalidInputError(
                "the model's chat template does not write this turn of the assistant, so the "
                "conversation cannot go on from its recorded tokens",
                path=f"messages[{index}]",
            )
        at, end = min(ends)
        return rest[at + len(end) * is_ended :]

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), **options: Any
    ) -> list[int]:
        """Tokens up to where the assistant begins to speak."""
        return self.encode(self.text(messages, tools, generate=True, **options))

    def encode(self, text: str) -> list[int]:
        """The tokens of rendered text, in which control tokens are meant."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # ------------------------------------------------------------------------ back

    @property
    def end_text(self) -> str:
        """The control token that ends a finished turn of the assistant."""
        if self._is_plain:
            return _PLAIN_END
        for end in self.family.ends:
            if end in self._control:
                return end
        return str(self._special.get("eos_token", ""))

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end the assistant's turn; empty where only `end_text` does."""
        if self._is_plain:
            return []
        ends = [end for end in self.family.ends if end in self._control]
        if not ends and "eos_token" in self._special:
            ends = [self._special["eos_token"]]
        return [self._id_of(end) for end in ends]

    @cached_property
    def heard_ids(self) -> frozenset[int]:
        """Control tokens that the family's reader reads."""
        return frozenset(self._id_of(t) for t in self.family.heard if t in self._control)

    @cached_property
    def silent_ids(self) -> frozenset[int]:
        """Control tokens that say nothing in an answer."""
        control = {self._id_of(token) for token in self._control}
        return frozenset({*control, *self.end_ids}).difference(self.heard_ids)

    def _id_of(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    @property
    def stop(self) -> list[int] | list[str]:
        """For `SamplingParams.stop`."""
        return self.end_ids or [_PLAIN_END]

    def reader(
        self,
        prompt: str = "",
        *,
        calls: bool = True,
        thinking: bool = True,
        tools: Sequence[Tool] = (),
    ) -> Reader:
        """Reads the answer that follows this prompt; see `Listening` for what to listen for."""
        if self._is_plain:
            return PlainReader()
        return self.family.reader(
            Listening(prompt=prompt, calls=calls, thinking=thinking, tools=tuple(tools))
        )

    def words(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that carry words, or that the family's reader reads.

        A control token in the middle of an answer says nothing, and its text, sent back as part of
        the conversation, would be refused.
        """
        return [token for token in tokens if token not in self.silent_ids]

    def message(
        self, tokens: Sequence[int], prompt: str = "", tools: Sequence[Tool] = ()
    ) -> Message:
        """The assistant's message, with its thoughts and its tool calls kept apart."""
        text = str(self.tokenizer.decode(self.words(tokens)))
        return whole(self.reader(prompt, tools=tools), text.removesuffix(_PLAIN_END))

    # ------------------------------------------------------------------------ inside

    def _closings(self) -> list[str]:
        """The texts that may end a turn of the assistant in a conversation."""
        listed = (*self.family.ends, *self.family.closings)
        closings = [end for end in listed if end in self._control]
        return [*closings, end] if (end := self.end_text) else closings

    def _check(self, messages: Sequence[Message], num_known: int) -> None:
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidInputError(
                    f"role {message.role[:40]!r} is unknown; use {', '.join(ROLES)}",
                    path=f"messages[{index}].role",
                )
            if index < num_known:
                continue
            texts = [message.content, message.reasoning]
            texts += [call.arguments for call in message.tool_calls]
            for token in self._control:
                # It would end a turn early, or begin one in another's name.
                if any(token in text for text in texts):
                    raise InvalidInputError(
                        f"the text holds the control token {token}",
                        path=f"messages[{index}].content",
                    )

    def _in_words(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The messages, with what the template does not know written out."""
        worded = list(messages)
        if "developer" not in self._template:
            worded = [replace(m, role="system") if m.role == "developer" else m for m in worded]
        if tools and "tools" not in self._template:
            listed = "\n".join(json.dumps(tool.for_template()) for tool in tools)
            words = _TOOLS % listed
            if worded and worded[0].role == "system":
                worded[0] = replace(worded[0], content=f"{worded[0].content}\n\n{words}".strip())
            else:
                worded.insert(0, Message(role="system", content=words))
        if "tool_calls" not in self._template:
            worded = [_calls_in_words(message) for message in worded]
        if not any(word in self._template for word in ("reasoning_content", "thinking")):
            worded = [_thoughts_in_words(message) for message in worded]
        return worded


def _marked(message: Message, mark: str) -> Message:
    """The same turn with a mark as its last words."""
    if not message.tool_calls:
        return replace(message, content=mark, reasoning="")
    last = replace(message.tool_calls[-1], arguments=json.dumps({"mark": mark}))
    return replace(message, tool_calls=(*message.tool_calls[:-1], last), reasoning="")


def _calls_in_words(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [{"name": call.name, "arguments": call.parsed()} for call in message.tool_calls]
    words = f"<tool_call>\n{json.dumps(calls, ensure_ascii=False)}\n</tool_call>"
    content = f"{message.content}\n{words}" if message.content else words
    return replace(message, content=content, tool_calls=())


def _thoughts_in_words(message: Message) -> Message:
    if not message.reasoning:
        return message
    content = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
    return replace(message, content=content, reasoning="")


def control_tokens(tokenizer: Any) -> frozenset[str]:
    """Tokens that steer the model and never belong to what somebody said."""
    listed = getattr(tokenizer, "all_special_tokens", None) or ()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = backend.get_added_tokens_decoder() if backend is not None else {}
    special = [token.content for token in added.values() if token.special]
    return frozenset(str(token) for token in (*listed, *special) if len(str(token)) > 2)

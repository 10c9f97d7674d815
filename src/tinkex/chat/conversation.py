"""One model's way of having a conversation: messages to tokens, and its answers back to messages.

The tokenizer's own chat template decides how a conversation reads. A tokenizer without one gets
ChatML where it has those tokens, else plain `User:` and `Assistant:` turns. What a template does
not know (tools, calls, reasoning) is written into the text in the family's own form: a tool that
was asked for is never left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinkex.chat.families import GENERIC, Family, Listening, family_of
from tinkex.chat.messages import ROLES, Message, Tool
from tinkex.chat.reading import PlainReader, Reader, whole
from tinkex.chat.template import render
from tinkex.errors import InvalidInputError

__all__ = ["Conversation"]

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


class Conversation:
    """Renders and reads for one tokenizer: of `tokenizers` (ours) or of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        own = getattr(tokenizer, "chat_template", None)
        self._is_plain = own is None and "<|im_end|>" not in self._control
        self._template: str = own or (_PLAIN if self._is_plain else _CHATML)
        self.family: Family = GENERIC if self._is_plain else family_of(self._template)
        self._special = {
            name: token
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if isinstance(token := getattr(tokenizer, name, None), str)
        }

    # ------------------------------------------------------------------------ out

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generate: bool = False,
        **options: Any,
    ) -> str:
        """The conversation as the model reads it.

        Args:
            generate: End where the assistant begins to speak.
            options: What the template reads besides, such as `enable_thinking`.

        Raises:
            InvalidInputError: A role is unknown, a text holds a control token, or the template
                refuses.
        """
        self._check(messages)
        told = self._in_words(messages, tools)
        knows_tools = "tools" in self._template
        return render(
            self._template,
            messages=[message.for_template() for message in told],
            tools=[tool.for_template() for tool in tools] if knows_tools else None,
            special_tokens=self._special,
            add_generation_prompt=generate,
            **options,
        )

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
        """What a finished assistant's turn ends with."""
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
        return [int(self.tokenizer.convert_tokens_to_ids(end)) for end in ends]

    @property
    def stop(self) -> list[int] | list[str]:
        """For `SamplingParams.stop`."""
        return self.end_ids or [_PLAIN_END]

    def reader(self, prompt: str = "", *, calls: bool = True, thinking: bool = True) -> Reader:
        """Reads the answer that follows this prompt; see `Listening` for what to listen for."""
        if self._is_plain:
            return PlainReader()
        return self.family.reader(Listening(prompt=prompt, calls=calls, thinking=thinking))

    def without_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that carry words: without the one that ended the turn."""
        ids = list(tokens)
        if ids and ids[-1] in self.end_ids and not self.keeps_end:
            ids.pop()
        return ids

    @property
    def keeps_end(self) -> bool:
        """Whether the end token is read too: harmony's `<|call|>` closes the call before it."""
        return self.family.name == "gpt-oss"

    def message(self, tokens: Sequence[int], prompt: str = "") -> Message:
        """What the assistant said, apart from what it thought and which tools it called."""
        said = str(self.tokenizer.decode(self.without_end(tokens)))
        return whole(self.reader(prompt), said.removesuffix(_PLAIN_END))

    # ------------------------------------------------------------------------ inside

    def _check(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidInputError(
                    f"role {message.role[:40]!r} is unknown; use {', '.join(ROLES)}",
                    path=f"messages[{index}].role",
                )
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
        told = list(messages)
        if "developer" not in self._template:
            told = [replace(m, role="system") if m.role == "developer" else m for m in told]
        if tools and "tools" not in self._template:
            listed = "\n".join(json.dumps(tool.for_template()) for tool in tools)
            words = _TOOLS % listed
            if told and told[0].role == "system":
                told[0] = replace(told[0], content=f"{told[0].content}\n\n{words}".strip())
            else:
                told.insert(0, Message(role="system", content=words))
        if "tool_calls" not in self._template:
            told = [_calls_in_words(message) for message in told]
        if not any(word in self._template for word in ("reasoning_content", "thinking")):
            told = [_thoughts_in_words(message) for message in told]
        return told


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

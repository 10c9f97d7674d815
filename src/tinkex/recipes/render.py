"""Turn messages into tokens, and say which of them the model should learn.

The tokenizer's own chat template decides how a conversation reads; a tokenizer with ChatML tokens
and no template gets ChatML, any other gets plain `User:`/`Assistant:` turns. Every turn is encoded
by itself, at the same borders where sampling will stop and start, so what is trained is what is
sampled. Knows tokenizers and text; nothing of servers and losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinkex.errors import InvalidInputError
from tinkex.recipes.data import Message
from tinkex.types import Datum, ModelInput

__all__ = ["Rendered", "Renderer"]

_CHATML_END = "<|im_end|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as tokens; a token of weight 1 is one the model should learn to say."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def num_learned(self) -> int:
        return int(sum(self.weights))

    def datum(self, scale: float = 1.0) -> Datum:
        """The training example: predict token t+1 from the tokens up to t."""
        return Datum(
            model_input=ModelInput.from_ints(list(self.tokens[:-1])),
            loss_fn_inputs={
                "target_tokens": list(self.tokens[1:]),
                "weights": [weight * scale for weight in self.weights[1:]],
            },
        )


class Renderer:
    """Messages to tokens and back, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._style = _style(tokenizer)
        self._special = _special_tokens(tokenizer)

    @property
    def stop(self) -> list[int] | list[str]:
        """What ends the assistant's turn, for `SamplingParams.stop`."""
        if self._style == "plain":
            return ["\nUser:"]
        return [self._end_id()]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the assistant begins to speak."""
        self._check(messages)
        return self._encode(self._text(messages, generate=True))

    def example(
        self, messages: Sequence[Message], learn: Literal["last", "all"] = "all"
    ) -> Rendered:
        """A whole conversation. `learn`: all of the assistant's turns, or only the last."""
        self._check(messages)
        tokens: list[int] = []
        weights: list[float] = []
        done = ""
        last = len(messages) - 1
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._text(messages[:index], generate=True)
            answered = self._text(messages[: index + 1])
            _check_prefix(asked, done)
            _check_prefix(answered, asked)
            before, answer = self._encode(asked[len(done) :]), self._answer(answered[len(asked) :])
            tokens += before + answer
            learned = 1.0 if learn == "all" or index == last else 0.0
            weights += [0.0] * len(before) + [learned] * len(answer)
            done = asked + self._answer_text(answered[len(asked) :])
        return Rendered(tokens=tuple(tokens), weights=tuple(weights))

    def text(self, tokens: Sequence[int]) -> str:
        """What the assistant said: decoded, without the mark that ends its turn."""
        ids = list(tokens)
        if self._style != "plain" and ids and ids[-1] == self._end_id():
            ids.pop()
        said = str(self.tokenizer.decode(ids))
        return said.removesuffix("\nUser:").strip()

    # ------------------------------------------------------------------------------ inside

    def _text(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        if self._style == "template":
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=generate,
                )
            )
        return (_chatml if self._style == "chatml" else _plain)(messages, generate)

    def _answer_text(self, text: str) -> str:
        """Cut what follows the end mark: sampling stops there, so it is never learned."""
        end = self._end_text()
        position = text.rfind(end)
        if position < 0:
            raise InvalidInputError(
                f"the chat template does not end the assistant's turn with {end!r}, so the model "
                "could never learn to stop"
            )
        return text[: position + len(end)]

    def _answer(self, text: str) -> list[int]:
        return self._encode(self._answer_text(text))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _end_text(self) -> str:
        if self._style == "plain":
            return "\nUser:"
        return _CHATML_END if _CHATML_END in self._special else str(self.tokenizer.eos_token)

    def _end_id(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self._end_text()))

    def _check(self, messages: Sequence[Message]) -> None:
        """Text that spells a control token would end a turn early; refuse it by name."""
        for index, message in enumerate(messages):
            for token in self._special:
                if token in message["content"]:
                    raise InvalidInputError(
                        f"messages[{index}].content holds the control token {token}"
                    )


def _style(tokenizer: Any) -> Literal["template", "chatml", "plain"]:
    if getattr(tokenizer, "chat_template", None):
        return "template"
    return "chatml" if _CHATML_END in _special_tokens(tokenizer) else "plain"


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    listed = getattr(tokenizer, "all_special_tokens", None) or ()
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return frozenset(str(token) for token in (*listed, *added) if len(str(token)) > 2)


def _check_prefix(text: str, prefix: str) -> None:
    if not text.startswith(prefix):
        raise InvalidInputError(
            "the chat template rewrites earlier turns when a later one is added, so one example "
            "cannot hold several answers; split the conversation into one row per answer"
        )


def _chatml(messages: Sequence[Message], generate: bool) -> str:
    turns = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}{_CHATML_END}\n"
        for message in messages
    )
    return turns + ("<|im_start|>assistant\n" if generate else "")


def _plain(messages: Sequence[Message], generate: bool) -> str:
    names = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
    turns = "".join(f"{names[m['role']]}: {m['content']}\n" for m in messages)
    if generate:
        return turns + "Assistant:"
    return turns + ("User:" if messages and messages[-1]["role"] == "assistant" else "")

"""Turn messages into tokens, and say which of them the model should learn.

`tinkex.chat` decides how a conversation reads. Every turn is encoded by itself, at the same borders
where sampling will stop and start, so what is trained is what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinkex.chat.messages import Message as ChatMessage
from tinkex.chat.renderer import ChatRenderer
from tinkex.errors import InvalidInputError
from tinkex.recipes.data import Message
from tinkex.types import Datum, ModelInput

__all__ = ["Rendered", "Renderer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as tokens; a token of weight 1 is one the model should learn to say."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    question: tuple[Message, ...] = ()
    """Messages before the last answer; empty for plain text."""

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
        self._chat = ChatRenderer(tokenizer)

    @property
    def stop(self) -> list[int] | list[str]:
        """Tokens or texts that end the assistant's turn, for `SamplingParams.stop`."""
        return self._chat.stop

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the assistant begins to speak."""
        return self._chat.encode(self._text(messages, generate=True))

    def example(
        self,
        messages: Sequence[Message],
        learn: Literal["last", "all"] = "all",
        max_length: int | None = None,
        *,
        num_prompt: int = 0,
    ) -> Rendered:
        """A whole conversation. `learn`: all of the assistant's turns, or only the last.

        Args:
            num_prompt: The first messages that are read and not learned, whoever speaks.

        Raises:
            InvalidInputError: It has more than `max_length` tokens, or the template does not fit.
        """
        tokens: list[int] = []
        weights: list[float] = []
        done = ""
        last = len(messages) - 1
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:index], generate=True)
            answered = self._text(messages[: index + 1])
            _check_prefix(prompt, done)
            _check_prefix(answered, prompt)
            answer = self._answer(answered[len(prompt) :])
            # Encoded apart: a token across the border could never be sampled.
            read, spoken = self._chat.encode(prompt[len(done) :]), self._chat.encode(answer)
            tokens += read + spoken
            is_asked = learn == "all" and index >= num_prompt
            learned = 1.0 if is_asked or index == last else 0.0
            weights += [0.0] * len(read) + [learned] * len(spoken)
            done = prompt + answer
        if max_length is not None and len(tokens) > max_length:
            raise InvalidInputError(f"{len(tokens)} tokens, more than max_length {max_length}")
        question = tuple(messages[:-1])
        return Rendered(tokens=tuple(tokens), weights=tuple(weights), question=question)

    def plain(self, text: str, max_length: int | None = None) -> Rendered:
        """Text without a chat template: every token after the first is learned, and the end.

        Raises:
            InvalidInputError: It has more than `max_length` tokens, or under two.
        """
        tokens = [int(token) for token in self.tokenizer.encode(text)]
        end = getattr(self.tokenizer, "eos_token_id", None)
        if end is not None and tokens[-1:] != [end]:
            tokens.append(int(end))
        if len(tokens) < 2:
            raise InvalidInputError("one token alone: there is nothing to predict")
        if max_length is not None and len(tokens) > max_length:
            raise InvalidInputError(f"{len(tokens)} tokens, more than max_length {max_length}")
        return Rendered(tokens=tuple(tokens), weights=(0.0, *[1.0] * (len(tokens) - 1)))

    def between(
        self,
        messages: Sequence[Message],
        answer: str,
        replies: Sequence[Message],
        said: Sequence[int],
    ) -> list[int]:
        """Tokens between an answer that was sampled and the assistant's next turn.

        `said` are the tokens of the answer as they were sampled: they stay as they are, whatever
        encoding their text again would give. An answer that was cut short is ended first.
        """
        with_answer = [*messages, {"role": "assistant", "content": answer}]
        answered = self._answer(self._text(with_answer))
        whole = self._text([*with_answer, *replies], generate=True)
        _check_prefix(whole, answered)
        ended = str(self.tokenizer.decode(list(said))).endswith(self._chat.end_text)
        ended = ended or bool(said and said[-1] in self._chat.end_ids)
        return self._chat.encode(("" if ended else self._chat.end_text) + whole[len(answered) :])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer: decoded, without the mark that ends the turn."""
        text = str(self.tokenizer.decode(self._chat.words(tokens)))
        return text.removesuffix(self._chat.end_text).strip()

    def _text(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        chat = [ChatMessage(role=m["role"], content=m["content"]) for m in messages]
        return self._chat.text(chat, generate=generate)

    def _answer(self, text: str) -> str:
        """Cut what follows the end mark: sampling stops there, so it is never learned."""
        end = self._chat.end_text
        position = text.rfind(end) if end else -1
        if position < 0:
            raise InvalidInputError(
                f"the chat template does not end the assistant's turn with {end!r}, so the model "
                "could never learn to stop"
            )
        return text[: position + len(end)]


def _check_prefix(text: str, prefix: str) -> None:
    if not text.startswith(prefix):
        raise InvalidInputError(
            "the chat template rewrites earlier turns when a later one is added, so one example "
            "cannot hold several answers; split the conversation into one row per answer"
        )

"""A conversation recorded to the token, as sequences that can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkex.types.data.datum import Datum
from tinkex.types.data.model_input import ModelInput
from tinkex.types.fields.message import Listing, Response
from tinkex.types.fields.plain import PlainRecord


class TrajectoryAnswer(Response):
    """A sampled answer and the tokens between it and the answer it follows."""

    answer_id: int
    parent_id: int | None = None
    prompt_tokens: Listing[int]
    tokens: Listing[int]
    logprobs: Listing[float]
    stop_reason: str
    model: str
    snapshot: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySequence(PlainRecord):
    """A branch of a conversation, from its first token to its last answer."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    """1 for each token that the model sampled, 0 for each it was given."""
    logprobs: tuple[float, ...]
    """Of the sampled tokens, when they were sampled; 0 for the others."""
    snapshots: tuple[str, ...]
    """Which weights made each answer; an empty text is the base model."""
    stop_reason: str
    """How the last answer ended."""

    def to_datum(self, advantage: float) -> Datum:
        """A training example for `importance_sampling` and its kin: the sampled tokens count."""
        shifted = self.mask[1:]
        return Datum(
            model_input=ModelInput.from_ints(list(self.tokens[:-1])),
            loss_fn_inputs={
                "target_tokens": list(self.tokens[1:]),
                "logprobs": list(self.logprobs[1:]),
                "advantages": [advantage if sampled else 0.0 for sampled in shifted],
            },
        )


class Trajectory(Response):
    """Every answer that was recorded under one id."""

    trajectory_id: str
    answers: Listing[TrajectoryAnswer]

    @property
    def sequences(self) -> list[TrajectorySequence]:
        """A sequence per branch: a conversation that was continued in two ways gives two."""
        parents = {answer.parent_id for answer in self.answers}
        leaves = [answer for answer in self.answers if answer.answer_id not in parents]
        return [self._sequence(leaf) for leaf in leaves]

    def to_datums(
        self, reward: float | Sequence[float] | Callable[[TrajectorySequence], float]
    ) -> list[Datum]:
        """Training examples, one per branch, whose sampled tokens all have the given advantage.

        Args:
            reward: The advantage: one for all, one per branch, or a function of a branch.
        """
        sequences = self.sequences
        if callable(reward):
            rewards = [float(reward(sequence)) for sequence in sequences]
        elif isinstance(reward, Sequence):
            rewards = [float(one) for one in reward]
        else:
            rewards = [float(reward)] * len(sequences)
        return [
            sequence.to_datum(advantage)
            for sequence, advantage in zip(sequences, rewards, strict=True)
        ]

    def _sequence(self, leaf: TrajectoryAnswer) -> TrajectorySequence:
        by_id = {answer.answer_id: answer for answer in self.answers}
        chain = [leaf]
        while (parent := chain[-1].parent_id) is not None:
            chain.append(by_id[parent])
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for answer in reversed(chain):
            num_prompt = len(answer.prompt_tokens)
            tokens += [*answer.prompt_tokens, *answer.tokens]
            mask += [0] * num_prompt + [1] * len(answer.tokens)
            logprobs += [0.0] * num_prompt + list(answer.logprobs)
        return TrajectorySequence(
            tokens=tuple(tokens),
            mask=tuple(mask),
            logprobs=tuple(logprobs),
            snapshots=tuple(answer.snapshot for answer in reversed(chain)),
            stop_reason=leaf.stop_reason,
        )

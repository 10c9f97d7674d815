"""Why a sampled sequence ended."""

from __future__ import annotations

from enum import StrEnum

MAX_REASON = 100
"""Most characters of a reason."""


class StopReason(StrEnum):
    """`length` or `stop` on today's wire; the other three come from older descriptions of it.

    A text this SDK does not know is kept as it is: `StopReason("filtered") == "filtered"`.
    """

    LENGTH = "length"
    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    STOP_SEQUENCE = "stop_sequence"
    EOS = "eos"

    @classmethod
    def _missing_(cls, value: object) -> StopReason | None:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_REASON:
            return None
        folded = value.lower()
        return next((member for member in cls if member.value == folded), None) or _kept(value)

    def __reduce_ex__(self, protocol: object) -> tuple[type[StopReason], tuple[str]]:
        # By its text: Python 3.11.2 pickles a member by its name, which a kept text is not.
        return StopReason, (self.value,)

    @property
    def is_length(self) -> bool:
        """The sequence was cut because it reached its token limit."""
        return self in (StopReason.LENGTH, StopReason.MAX_TOKENS)


def _kept(value: str) -> StopReason:
    """A reason that is no member: the text, with the methods of those that are."""
    reason = str.__new__(StopReason, value)
    reason._name_, reason._value_ = value, value
    return reason

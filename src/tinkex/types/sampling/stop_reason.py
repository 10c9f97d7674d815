"""Why a sampled sequence ended."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """`length` or `stop` on today's wire; the other three come from older descriptions of it."""

    LENGTH = "length"
    STOP = "stop"
    MAX_TOKENS = "max_tokens"
    STOP_SEQUENCE = "stop_sequence"
    EOS = "eos"

    @classmethod
    def _missing_(cls, value: object) -> StopReason | None:
        folded = str(value).lower()
        return next((member for member in cls if member.value == folded), None)

    @property
    def is_length(self) -> bool:
        """The sequence was cut because it reached its token limit."""
        return self in (StopReason.LENGTH, StopReason.MAX_TOKENS)

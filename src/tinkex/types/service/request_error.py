"""Who can fix a failed request, and whether trying again can help."""

from __future__ import annotations

from enum import StrEnum

from tinkex.errors import is_retryable

__all__ = ["RequestErrorCategory", "is_retryable"]


class RequestErrorCategory(StrEnum):
    """Read in any case, sent in lowercase; a text this SDK does not know reads as `Unknown`."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        folded = str(value).lower()
        return next((member for member in cls if member.value == folded), cls.Unknown)

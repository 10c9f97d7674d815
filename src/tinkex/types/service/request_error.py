"""Who can fix a failed request, and whether trying again can help."""

from __future__ import annotations

from enum import StrEnum


class RequestErrorCategory(StrEnum):
    """Read in any case, sent in lowercase; a text this SDK does not know reads as `Unknown`."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        folded = str(value).lower()
        return next((member for member in cls if member.value == folded), cls.Unknown)


def is_retryable_status(status: int) -> bool:
    return status in (408, 409, 429) or status >= 500


def is_retryable(category: str, status: int | None = None) -> bool:
    """Whether the same request may succeed later (R4).

    A user's mistake never does. Otherwise 408, 409, 429 and 5xx do, other statuses do not, and a
    failure without a status (the request ran and broke on the server) does.
    """
    if RequestErrorCategory(category) is RequestErrorCategory.User:
        return False
    return status is None or is_retryable_status(status)

"""Whose sessions or checkpoints a search looks at."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tinkex.types.fields.bounds import Name, listing
from tinkex.types.fields.message import Request


class OwnSearchOwner(Request):
    """The caller alone."""

    type: Literal["own"] = "own"


class AccessibleSearchOwner(Request):
    """Every owner whose projects the caller may list; on a Tinkex server that is the caller."""

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Request):
    """Up to ten users by their names."""

    type: Literal["user"] = "user"
    owner_urns: Annotated[list[Name], *listing(10, 1)]


SearchOwner: TypeAlias = Annotated[
    OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")
]

"""Finding checkpoints by project, metadata, type, owner or base model (SDK 0.39)."""

from __future__ import annotations

from typing import Annotated

from tinkex.contract.bounds import Between
from tinkex.contract.cost import SEARCH
from tinkex.types.account.checkpoints import Checkpoint, CheckpointType
from tinkex.types.fields.bounds import Metadata, Names, Path
from tinkex.types.fields.message import AwareMoment, Listing, Request, Response
from tinkex.types.service.search_owner import OwnSearchOwner, SearchOwner


class CheckpointSearchCursor(Response):
    """Where the next page starts."""

    last_created_at: AwareMoment
    last_checkpoint_uuid: Path


class CheckpointSearchRequest(Request):
    """All conditions must hold; a list of projects or base models matches any of its members."""

    project_ids: Names | None = None
    user_metadata: Metadata = {}
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: Names | None = None
    """As `Checkpoint.base_model` shows them. An empty list matches nothing."""
    limit: Annotated[int, Between(1, SEARCH.rows, becomes="rows")] = 50
    cursor: CheckpointSearchCursor | None = None


class CheckpointSearchResponse(Response):
    """A page of checkpoints, newest first; `next_cursor` is None on the last."""

    checkpoints: Listing[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None

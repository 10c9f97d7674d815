"""A run that holds a checkpoint made elsewhere, and was never loaded here."""

from __future__ import annotations

import time
import uuid
from typing import Any

from tinkex.store import Model, Session, Store, User


def new_run_id() -> str:
    return f"{uuid.uuid4()}:train:0"


async def add(
    store: Store,
    run_id: str,
    user: User,
    *,
    base_model: str,
    lora: dict[str, Any],
    optimizer_config: dict[str, Any],
    metadata: dict[str, Any],
    project_id: str | None = None,
) -> None:
    """List such a run, in a session that has ended."""
    now = time.time()
    session_id = run_id.split(":")[0]
    # A copy that is repeated after a crash may find its session, and no run in it yet.
    if await store.call(store.sessions.get, session_id) is None:
        session = Session(
            session_id=session_id,
            user_id=user.user_id,
            created_at=now,
            last_heartbeat=now,
            tags=[],
            user_metadata=metadata,
            display_name=None,
            project_id=project_id,
            sdk_version="",
            status={"type": "client_finished", "reason": {"type": "success"}},
        )
        await store.call(store.sessions.create, session)
    model = Model(
        model_id=run_id,
        session_id=session_id,
        user_id=user.user_id,
        model_seq_id=0,
        base_model=base_model,
        lora=lora,
        optimizer_config=optimizer_config,
        user_metadata=metadata,
        created_at=now,
        last_request_time=now,
        corrupted=False,
        unloaded=True,
    )
    await store.call(store.models.create, model)

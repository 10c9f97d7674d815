"""What is kept for a bounded time goes when its time has come."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from tinkex.server.files.checkpoints import Shelf
from tinkex.server.files.sweeper import TRAJECTORY_TTL_S, Sweeper
from tinkex.server.process.config import ServerConfig
from tinkex.store import Store, TrajectoryAnswer


async def test_a_recorded_conversation_is_kept_for_seven_days(tmp_path: Path):
    store = Store.in_folder(tmp_path)
    now = time.time()
    fresh = TrajectoryAnswer(
        user_id="ann",
        trajectory_id="new",
        parent_id=None,
        history=b"h",
        prompt_tokens=b"1234",
        tokens=b"1234",
        logprobs=b"1234",
        stop_reason="stop",
        model="m",
        snapshot="",
        created_at=now - TRAJECTORY_TTL_S + 60,
    )
    old = replace(fresh, trajectory_id="old", created_at=now - TRAJECTORY_TTL_S - 60)
    store.trajectories.add([fresh, old])
    await Sweeper(store, Shelf(store, tmp_path), ServerConfig()).sweep(now)
    assert store.trajectories.of("ann", "old") == []
    assert len(store.trajectories.of("ann", "new")) == 1
    store.close()

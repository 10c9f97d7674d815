"""Rows for store and REST tests, with everything filled in that a test does not care about."""

from __future__ import annotations

import time
from typing import Any

from tinkex.store import Checkpoint, Ended, Model, NewRow, SamplingSession, Session


def session(session_id: str = "s", user_id: str = "ann", **changes: Any) -> Session:
    values: dict[str, Any] = {
        "session_id": session_id,
        "user_id": user_id,
        "created_at": time.time(),
        "last_heartbeat": time.time(),
        "tags": [],
        "user_metadata": {},
        "display_name": None,
        "project_id": None,
        "sdk_version": "0.36.0",
        "status": {"type": "active"},
    }
    return Session(**(values | changes))


def model(model_id: str = "s:train:0", user_id: str = "ann", **changes: Any) -> Model:
    values: dict[str, Any] = {
        "model_id": model_id,
        "session_id": model_id.split(":")[0],
        "user_id": user_id,
        "model_seq_id": 0,
        "base_model": "toy",
        "lora": {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": False},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": None,
        "created_at": time.time(),
        "last_request_time": time.time(),
        "corrupted": False,
        "unloaded": False,
    }
    return Model(**(values | changes))


def op(seq_id: int, model_id: str = "s:train:0", **changes: Any) -> NewRow:
    values: dict[str, Any] = {
        "model_id": model_id,
        "seq_id": seq_id,
        "kind": "forward_backward",
        "request_id": f"{model_id}:{seq_id}",
        "user_id": "ann",
        "body": f"body {seq_id}".encode(),
    }
    return NewRow(**(values | changes))


def ended(seq_id: int = 1, model_id: str = "s:train:0", **changes: Any) -> Ended:
    values: dict[str, Any] = {
        "request_id": f"{model_id}:{seq_id}",
        "result": b"r",
        "result_type": "json",
        "finished_at": time.time(),
    }
    return Ended(**(values | changes))


def checkpoint(
    name: str = "first",
    kind: str = "weights",
    model_id: str = "s:train:0",
    user_id: str = "ann",
    **changes: Any,
) -> Checkpoint:
    values: dict[str, Any] = {
        "path": f"tinker://{model_id}/{kind}/{name}",
        "model_id": model_id,
        "user_id": user_id,
        "kind": kind,
        "name": name,
        "folder": f"/nowhere/{name}",
        "size_bytes": 100,
        "base_model": "toy",
        "lora": {"rank": 8, "train_attn": True, "train_mlp": True, "train_unembed": False},
    }
    return Checkpoint(**(values | changes))


def sampling(seq_id: int = 0, session_id: str = "s", **changes: Any) -> SamplingSession:
    values: dict[str, Any] = {
        "sampling_session_id": f"{session_id}:sample:{seq_id}",
        "session_id": session_id,
        "user_id": "ann",
        "seq_id": seq_id,
        "base_model": "toy",
        "model_path": None,
        "folder": None,
        "ephemeral": False,
        "created_at": time.time(),
    }
    return SamplingSession(**(values | changes))

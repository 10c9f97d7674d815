"""A bare client of the wire for tests: as patient as a stock SDK, and nothing hidden.

It retries while the server cannot be reached, as stock clients do, and polls until a promise is
settled. Nothing here validates, chunks or numbers by itself unless asked.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
import numpy as np

from tinkex.wire import tinker_public_pb2 as pb

PATIENCE_S = 60.0
PROTO = {"content-type": "application/x-protobuf"}


class Failed(Exception):
    """The server settled a promise with an error."""

    def __init__(self, error: str, category: str) -> None:
        super().__init__(error)
        self.category = category


class WireClient:
    def __init__(self, base_url: str, *, key: str = "tml-test", timeout_s: float = 45.0) -> None:
        self.http = httpx.Client(
            base_url=base_url, headers={"x-api-key": key}, timeout=timeout_s, trust_env=False
        )

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """POST until the server answers at all."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if isinstance(body, bytes):
                    return self.http.post(f"/api/v1/{path}", content=body, **kwargs)
                return self.http.post(f"/api/v1/{path}", json=body or {}, **kwargs)
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def ok(self, path: str, body: Any = None, **kwargs: Any) -> dict[str, Any]:
        response = self.post(path, body, **kwargs)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def wait(self, request_id: str, accept: str = "application/x-protobuf") -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            response = self.post(
                "retrieve_future", {"request_id": request_id}, headers={"accept": accept}
            )
            if response.status_code not in (408, 500, 502, 503):
                return response
        raise TimeoutError(request_id)

    def result(self, promise: dict[str, Any]) -> Any:
        """The settled value: JSON as a dict, protobuf as its message's bytes."""
        response = self.wait(promise["request_id"])
        assert response.status_code == 200, response.text
        if "protobuf" in response.headers["content-type"]:
            return response.content
        body = response.json()
        if "error" in body:
            raise Failed(body["error"], body["category"])
        return body

    # ---------------------------------------------------------------------------- requests

    def session(self) -> str:
        return str(self.ok("create_session", {"tags": [], "sdk_version": "test"})["session_id"])

    def model(self, session_id: str, *, number: int = 0, **lora: Any) -> str:
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": "toy",
            "lora_config": {"rank": 4, "seed": 7, **lora},
            "optimizer_config": {"type": "adamw"},
        }
        return str(self.result(self.ok("create_model", body))["model_id"])

    def train(self, model_id: str, seq_id: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
        body = train_body(model_id, seq_id, tokens, **fields)
        return self.ok("forward_backward", body, headers=PROTO)

    def step(self, model_id: str, seq_id: int, learning_rate: float = 0.1) -> dict[str, Any]:
        body = {
            "model_id": model_id,
            "seq_id": seq_id,
            "adam_params": {"learning_rate": learning_rate},
        }
        return self.ok("optim_step", body)

    def save(self, model_id: str, seq_id: int, name: str) -> dict[str, Any]:
        body = {"model_id": model_id, "seq_id": seq_id, "path": name, "overwrite": False}
        return self.ok("save_weights", body)


def train_body(
    model_id: str,
    seq_id: int,
    tokens: list[int],
    *,
    loss_fn: str = "cross_entropy",
    weights: list[float] | None = None,
    forward_only: bool = False,
) -> bytes:
    message = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, dtype="<i4").tobytes()
    targets = np.array(tokens, dtype="<i8")
    values = np.ones(len(tokens)) if weights is None else np.array(weights)
    for name, array, dtype in (
        ("target_tokens", targets, pb.DTYPE_INT64),
        ("weights", values.astype("<f4"), pb.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = array.tobytes(), dtype
        tensor.shape.append(array.size)
    return bytes(message.SerializeToString())


def loss_of(payload: bytes) -> float:
    return float(pb.ForwardBackwardOutput.FromString(payload).metrics["loss:sum"])

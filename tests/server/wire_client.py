"""The bodies of raw requests, each written once, and two bare callers that send them.

`Caller` is for coroutines over any httpx client; an app in this process and the REST routes alone
are reached by it. `WireClient` is for threads and a real server process: as patient as a stock
SDK, it retries while the server cannot be reached. Both poll until a promise is settled; nothing
validates, chunks or numbers by itself. Load tests send the same bodies over `raw_http`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from tinkex.wire import tinker_public_pb2 as pb

PATIENCE_S = 180.0
PROTO = {"content-type": "application/x-protobuf"}
SESSION = {"tags": [], "sdk_version": "test"}


def model_body(session_id: str, number: int = 0, **lora: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": "toy",
        "lora_config": {"rank": 4, "seed": 7, **lora},
        "optimizer_config": {"type": "adamw"},
    }


def optim_body(model_id: str, seq_id: int, learning_rate: float = 0.1) -> dict[str, Any]:
    params = {"learning_rate": learning_rate}
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": params}


def save_body(model_id: str, seq_id: int, name: str) -> dict[str, Any]:
    return {"model_id": model_id, "seq_id": seq_id, "path": name, "overwrite": False}


def train_body(
    model_id: str,
    seq_id: int,
    tokens: list[int],
    *,
    loss_fn: str = "cross_entropy",
    weights: list[float] | None = None,
    forward_only: bool = False,
    config: Mapping[str, float | str] | None = None,
) -> bytes:
    message = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only
    )
    for name, value in (config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = value
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


class Caller:
    """Requests from coroutines. A `key` may be given with each of them."""

    http: httpx.AsyncClient

    async def post(
        self, path: str, body: Any = None, *, key: str = "tml-test", **kwargs: Any
    ) -> httpx.Response:
        headers = {"x-api-key": key, **kwargs.pop("headers", {})}
        if isinstance(body, bytes):
            kwargs["content"] = body
        else:
            kwargs["json"] = {} if body is None else body
        return await self.http.post(f"/api/v1/{path}", headers=headers, **kwargs)

    async def ok(self, path: str, body: Any = None, **kwargs: Any) -> dict[str, Any]:
        response = await self.post(path, body, **kwargs)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def call(
        self, method: str, path: str, status: int, *, key: str = "tml-ann", **request: Any
    ) -> Any:
        """Any method; checks the status, and the shape of an error. Gives the JSON, if any."""
        headers = {"x-api-key": key, **request.pop("headers", {})}
        answer = await self.http.request(method, f"/api/v1{path}", headers=headers, **request)
        assert answer.status_code == status, answer.text
        if status >= 400:
            check_error(answer)
        return answer.json() if answer.content else None

    async def result(self, promise: dict[str, Any], **kwargs: Any) -> Any:
        """Poll until the promise is settled: JSON as a dict, protobuf as its bytes."""
        headers = {"accept": "application/x-protobuf"}
        body = {"request_id": promise["request_id"]}
        # By the clock, not by a number of polls: some servers of tests hold a poll for 20 ms only,
        # and a machine under load may take seconds over a file.
        patience_ends = time.monotonic() + PATIENCE_S
        response = await self.post("retrieve_future", body, headers=headers, **kwargs)
        while response.status_code == 408 and time.monotonic() < patience_ends:
            response = await self.post("retrieve_future", body, headers=headers, **kwargs)
        assert response.status_code == 200, response.text
        is_proto = "protobuf" in response.headers["content-type"]
        return response.content if is_proto else response.json()

    async def session(self, **kwargs: Any) -> str:
        return str((await self.ok("create_session", SESSION, **kwargs))["session_id"])

    async def model(self, session_id: str | None = None, number: int = 0, **kwargs: Any) -> str:
        body = model_body(session_id or await self.session(**kwargs), number)
        promise = await self.ok("create_model", body, **kwargs)
        return str((await self.result(promise, **kwargs))["model_id"])

    async def train(
        self, model_id: str, seq_id: int, tokens: list[int], key: str = "tml-test", **fields: Any
    ) -> httpx.Response:
        body = train_body(model_id, seq_id, tokens, **fields)
        return await self.post("forward_backward", body, key=key, headers=PROTO)

    async def step(
        self, model_id: str, seq_id: int, learning_rate: float = 0.1, key: str = "tml-test"
    ) -> httpx.Response:
        return await self.post("optim_step", optim_body(model_id, seq_id, learning_rate), key=key)


def check_error(answer: httpx.Response) -> None:
    """The one error shape: never empty, never of unknown length (contract 1.6)."""
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    body = answer.json()
    assert isinstance(body["detail"], str)
    assert body["detail"]
    assert body["category"] == ("user" if answer.status_code < 500 else "server")


class Failed(Exception):
    """The server settled a promise with an error."""

    def __init__(self, error: str, category: str) -> None:
        super().__init__(error)
        self.category = category


class WireClient:
    def __init__(self, base_url: str, *, key: str = "tml-test", timeout_s: float = 100.0) -> None:
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

    def session(self) -> str:
        return str(self.ok("create_session", SESSION)["session_id"])

    def model(self, session_id: str, *, number: int = 0, **lora: Any) -> str:
        promise = self.ok("create_model", model_body(session_id, number, **lora))
        return str(self.result(promise)["model_id"])

    def train(self, model_id: str, seq_id: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
        body = train_body(model_id, seq_id, tokens, **fields)
        return self.ok("forward_backward", body, headers=PROTO)

    def step(self, model_id: str, seq_id: int, learning_rate: float = 0.1) -> dict[str, Any]:
        return self.ok("optim_step", optim_body(model_id, seq_id, learning_rate))

    def save(self, model_id: str, seq_id: int, name: str) -> dict[str, Any]:
        return self.ok("save_weights", save_body(model_id, seq_id, name))

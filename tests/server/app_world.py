"""A whole server inside the test's process: real routes, store and worker, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from wire_client import PROTO, train_body

from tinkex.server.app import create_app
from tinkex.server.config import ServerConfig
from tinkex.server.serve import make_workers, open_store
from tinkex.server.service import Service


@dataclass
class AppWorld:
    app: FastAPI
    http: httpx.AsyncClient

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    async def post(
        self, path: str, body: Any = None, *, key: str = "tml-test", **kwargs: Any
    ) -> httpx.Response:
        headers = {"x-api-key": key, **kwargs.pop("headers", {})}
        if isinstance(body, bytes):
            return await self.http.post(f"/api/v1/{path}", content=body, headers=headers, **kwargs)
        return await self.http.post(
            f"/api/v1/{path}", json={} if body is None else body, headers=headers, **kwargs
        )

    async def ok(self, path: str, body: Any = None, **kwargs: Any) -> dict[str, Any]:
        response = await self.post(path, body, **kwargs)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def result(self, promise: dict[str, Any], **kwargs: Any) -> Any:
        """Poll until the promise is settled: JSON as a dict, protobuf as its bytes."""
        headers = {"accept": "application/x-protobuf"}
        body = {"request_id": promise["request_id"]}
        for _ in range(1000):
            response = await self.post("retrieve_future", body, headers=headers, **kwargs)
            if response.status_code != 408:
                break
        assert response.status_code == 200, response.text
        is_proto = "protobuf" in response.headers["content-type"]
        return response.content if is_proto else response.json()

    async def session(self, **kwargs: Any) -> str:
        made = await self.ok("create_session", {"tags": [], "sdk_version": "test"}, **kwargs)
        return str(made["session_id"])

    async def model(self, session_id: str | None = None, number: int = 0, **kwargs: Any) -> str:
        body = {
            "session_id": session_id or await self.session(**kwargs),
            "model_seq_id": number,
            "base_model": "toy",
            "lora_config": {"rank": 4, "seed": 7},
        }
        promise = await self.ok("create_model", body, **kwargs)
        return str((await self.result(promise, **kwargs))["model_id"])

    async def facts(self) -> None:
        """Wait until the vocabulary is known here: before that the engine alone can refuse a token.

        A server gives a busy engine five seconds to say it, then goes on without.
        """
        assert await self.service.catalog.info("toy", timeout_s=60) is not None

    async def train(
        self, model_id: str, seq_id: int, tokens: list[int], **fields: Any
    ) -> httpx.Response:
        body = train_body(model_id, seq_id, tokens, **fields)
        return await self.post("forward_backward", body, headers=PROTO)

    async def step(self, model_id: str, seq_id: int, learning_rate: float = 0.1) -> httpx.Response:
        params = {"learning_rate": learning_rate}
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": params}
        return await self.post("optim_step", body)


@asynccontextmanager
async def open_app(folder: Path, **settings: Any) -> AsyncIterator[AppWorld]:
    """Start an app over `folder`; leaving the block stops it, so that it can be opened again."""
    config = ServerConfig(**({"engine": "toy", "data_dir": folder, "hold_s": 5.0} | settings))
    store = await asyncio.to_thread(open_store, config)
    app = await asyncio.to_thread(create_app, config, store, make_workers(config))
    transport = httpx.ASGITransport(app=app)
    try:
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        ):
            yield AppWorld(app, http)
    finally:
        await asyncio.to_thread(store.close)

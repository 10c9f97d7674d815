"""A server that keeps the contract and a network that does not.

`Server` is a correct, tiny Tinker server in memory: idempotent by (model, seq_id), in order, every
result a function of its request. `Network` stands between it and the client and injects, by a
seeded schedule, every row of contract 4.2 and 9: resets before and after the server acted,
stalls, half answers, 5xx bursts, 408 storms, 429 with each form of Retry-After, blank 400s,
duplicated requests, late answers, payload announcements. Both live in virtual time.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
from bodies import decode

from tinkex import types
from tinkex.client.config import ClientConfig
from tinkex.client.http.http1 import ProtocolError, Reply
from tinkex.wire import results

JSON = {"content-type": "application/json"}
PROTO = {"content-type": "application/x-protobuf"}


def json_reply(body: Any, status: int = 200, **headers: str) -> Reply:
    content = orjson.dumps(body)
    return Reply(status, {**JSON, "content-length": str(len(content)), **headers}, content)


@dataclass
class Promise:
    request_id: str
    ready_at: float
    body: bytes = b""
    content_type: str = "application/json"
    error: tuple[str, str] | None = None
    """(text, category)"""
    doom: str | None = None
    """gone: 410 for ever. refused: 403 for ever."""
    acknowledged: bool = False
    cancelled: bool = False


@dataclass
class Server:
    """The truth. Violations of the contract by the client are collected in `violations`."""

    flags: dict[str, Any] = field(default_factory=dict)
    has_config: bool = True
    jwt: bool = False
    compute_s: float = 0.5
    doom_seq: dict[int, str] = field(default_factory=dict)
    """Training seq_id -> user | server | gone | refused | bad: how that request must end."""
    lose_samples: set[int] = field(default_factory=set)
    """Sampling seq_ids whose promise is lost (410) once."""
    violations: list[str] = field(default_factory=list)
    submitted: dict[tuple[str, int], tuple[bytes, str]] = field(default_factory=dict)
    arrivals: list[tuple[str, int]] = field(default_factory=list)
    promises: dict[str, Promise] = field(default_factory=dict)
    heartbeats: int = 0
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    sampling_log: dict[str, list[str]] = field(default_factory=dict)
    models: int = 0
    samplers: int = 0

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        name = path.removeprefix("/api/v1/").partition("?")[0]
        if self.jwt and name not in ("client/config", "auth/token"):
            if not headers["X-API-Key"].startswith("eyJ"):
                self.violations.append(f"{name} without a token")
        handler = getattr(self, "on_" + name.replace("/", "_"), None)
        if handler is None and name.startswith("sessions/") and name.endswith("/finish"):
            self.finished.append(orjson.loads(body or b"{}")["reason"]["type"])
            return Reply(204, {}, b"")
        if handler is None:
            return json_reply({"detail": f"no {name}"}, 404)
        answer = handler(headers, body or b"")
        return await answer if asyncio.iscoroutine(answer) else answer

    # -- service

    def on_client_config(self, headers: Mapping[str, str], body: bytes) -> Reply:
        if not self.has_config:
            return json_reply({"detail": "Not Found"}, 404)
        return json_reply({**self.flags, "pjwt_auth_enabled": self.jwt})

    def on_client_dynamic_config(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return json_reply({"sample_cancel_enabled": True})

    def on_auth_token(self, headers: Mapping[str, str], body: bytes) -> Reply:
        import base64

        claims = base64.urlsafe_b64encode(orjson.dumps({"exp": time.time() + 1e6})).decode()
        return json_reply({"jwt": f"eyJh.{claims}.x"})

    def on_create_session(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return json_reply({"session_id": "S"})

    def on_session_heartbeat(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.heartbeats += 1
        return json_reply({})

    # -- training

    def on_create_model(self, headers: Mapping[str, str], body: bytes) -> Reply:
        number = orjson.loads(body)["model_seq_id"]
        model_id = f"S:train:{number}"
        return self._promise(f"create-{number}", {"model_id": model_id})

    def on_forward_backward(self, headers: Mapping[str, str], body: bytes) -> Reply:
        encoding = headers.get("Content-Encoding")
        asked = decode("forward_backward", body, headers["Content-Type"], encoding)
        return self._train(asked.model_id, asked.seq_id, body, lambda: self._loss(asked))

    def on_forward(self, headers: Mapping[str, str], body: bytes) -> Reply:
        asked = decode("forward", body, headers["Content-Type"])
        return self._train(asked.model_id, asked.seq_id, body, lambda: self._loss(asked))

    def _loss(self, asked: Any) -> types.ForwardBackwardOutput:
        data = asked.input.data
        outputs = [
            {"logprobs": types.TensorData.wrap(d.model_input.to_numpy().astype("<f4"))}
            for d in data
        ]
        total = float(sum(int(d.model_input.to_numpy().sum()) for d in data))
        return types.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": total})

    def on_optim_step(self, headers: Mapping[str, str], body: bytes) -> Reply:
        asked = orjson.loads(body)
        rate = asked["adam_params"].get("learning_rate", 1e-4)
        return self._train(
            asked["model_id"], asked["seq_id"], body, lambda: {"metrics": {"rate:mean": rate}}
        )

    def on_save_weights(self, headers: Mapping[str, str], body: bytes) -> Reply:
        asked = orjson.loads(body)
        path = f"tinker://{asked['model_id']}/weights/{asked['path']}"
        return self._train(asked["model_id"], asked["seq_id"], body, lambda: {"path": path})

    def on_save_weights_for_sampler(self, headers: Mapping[str, str], body: bytes) -> Reply:
        asked = orjson.loads(body)
        answer = {"sampling_session_id": f"S:sample:{asked['sampling_session_seq_id']}"}
        return self._train(asked["model_id"], asked["seq_id"], body, lambda: answer)

    def _train(self, model_id: str, seq_id: int, body: bytes, compute: Callable[[], Any]) -> Reply:
        key = (model_id, seq_id)
        if key in self.submitted:
            known, request_id = self.submitted[key]
            if known != body:
                self.violations.append(f"{key} was sent with two bodies")
            if self.doom_seq.get(seq_id) == "bad":
                return json_reply({"detail": f"request {seq_id} is malformed"}, 400)
            return json_reply({"request_id": request_id})
        self.arrivals.append(key)
        doom = self.doom_seq.get(seq_id)
        self.submitted[key] = (body, f"{model_id}:{seq_id}")
        if doom == "bad":
            return json_reply({"detail": f"request {seq_id} is malformed"}, 400)
        reply = self._promise(f"{model_id}:{seq_id}", compute())
        promise = self.promises[f"{model_id}:{seq_id}"]
        promise.ready_at += 0.01 * seq_id
        if doom in ("user", "server"):
            promise.error = (f"request {seq_id} failed", doom)
        promise.doom = doom if doom in ("gone", "refused") else None
        return reply

    def _promise(self, request_id: str, value: Any, **extra: Any) -> Reply:
        if request_id not in self.promises:
            now = asyncio.get_running_loop().time()
            promise = Promise(request_id, now + self.compute_s)
            if isinstance(value, dict):
                promise.body = orjson.dumps(value)
            else:
                made = results.encode(value, "application/x-protobuf" if self.has_config else None)
                promise.body, promise.content_type = made.content, made.content_type
            self.promises[request_id] = promise
        return json_reply({"request_id": request_id, **extra})

    # -- sampling

    def on_create_sampling_session(self, headers: Mapping[str, str], body: bytes) -> Reply:
        number = orjson.loads(body)["sampling_session_seq_id"]
        return json_reply({"sampling_session_id": f"S:sample:{number}"})

    def on_asample(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return json_reply(self._sample(orjson.loads(body)))

    def on_asample_batch(self, headers: Mapping[str, str], body: bytes) -> Reply:
        return json_reply({"promises": [self._sample(b) for b in orjson.loads(body)["requests"]]})

    def _sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        session, seq_id = asked["sampling_session_id"], asked["seq_id"]
        request_id = f"{session}:{seq_id}"
        ids = [f"{request_id}:{n}" for n in range(asked["num_samples"])]
        if request_id not in self.promises:
            prompt = asked["prompt"]["chunks"][0]["tokens"]
            tokens = np.array(prompt[::-1], np.int32)
            sequences = [types.SampledSequence("stop", tokens_np=tokens) for _ in ids]
            self._promise(request_id, types.SampleResponse(sequences))
            self.sampling_log.setdefault(session, []).append(request_id)
            if seq_id in self.lose_samples:
                self.promises[request_id].doom = "gone"
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def on_cancel_future(self, headers: Mapping[str, str], body: bytes) -> Reply:
        self.cancelled.append(orjson.loads(body)["request_id"])
        return json_reply({})

    # -- results

    async def on_retrieve_future(self, headers: Mapping[str, str], body: bytes) -> Reply:
        asked = orjson.loads(body)
        promise = self.promises.get(asked["request_id"])
        if promise is None:
            return json_reply({"detail": "no such promise"}, 404)
        if promise.doom == "gone":
            return json_reply({"detail": "gone"}, 410)
        if promise.doom == "refused":
            return json_reply({"detail": "not yours"}, 403)
        if not await self._hold(promise):
            state = {"queue_state": "paused_capacity", "queue_state_reason": "3 requests ahead"}
            return json_reply(state, 408)
        return self._payload(promise, asked)

    async def _hold(self, promise: Promise) -> bool:
        left = promise.ready_at - asyncio.get_running_loop().time()
        await asyncio.sleep(min(max(left, 0), 30.0))
        return left <= 30.0

    def _payload(self, promise: Promise, asked: dict[str, Any]) -> Reply:
        if promise.error is not None:
            return json_reply({"error": promise.error[0], "category": promise.error[1]})
        large = len(promise.body) > 100
        if large and asked.get("allow_metadata_only"):
            size = len(promise.body)
            return json_reply({"status": "complete_metadata", "response_payload_size": size})
        return Reply(200, {"content-type": promise.content_type}, promise.body)

    async def on_retrieve_futures(self, headers: Mapping[str, str], body: bytes) -> Reply:
        asked = orjson.loads(body)
        for request_id in asked["retrieved_request_ids"]:
            self.promises[request_id].acknowledged = True
        log = self.sampling_log.get(asked["target"]["sampling_session_id"], [])
        start = asked["prev_cursor"]
        loop = asyncio.get_running_loop()
        until = loop.time() + float(asked.get("timeout", 30.0))
        while True:
            # The cursor only passes a prefix that is complete: order of completion is kept.
            done = [i for i in log[start:] if self.promises[i].ready_at <= loop.time()]
            prefix = 0
            while start + prefix < len(log) and log[start + prefix] in done:
                prefix += 1
            if prefix or loop.time() >= until:
                break
            await asyncio.sleep(0.25)
        finished = log[start : start + prefix]
        return self._completions(finished, start + prefix, inline=bool(asked.get("inline_results")))

    def _completions(self, ids: list[str], cursor: int, *, inline: bool) -> Reply:
        entries: list[dict[str, Any]] = []
        payloads = b""
        for request_id in ids:
            promise = self.promises[request_id]
            entry: dict[str, Any] = {"state": "finished", "request_id": request_id}
            if inline and promise.doom is None:
                entry["size"] = len(promise.body)
                payloads += promise.body
            entries.append(entry)
        header = orjson.dumps({"completions": entries, "cursor": cursor})
        if not inline:
            return Reply(200, JSON, header)
        frames = len(header).to_bytes(4, "little") + header + payloads
        return Reply(200, {"content-type": "application/x-tinkex-frames"}, frames)


# --------------------------------------------------------------------------------- the network


@dataclass
class Network:
    """Faults by a seeded schedule; never more than `patience` in a row for one kind of call."""

    server: Server
    rng: random.Random
    rate: float = 0.3
    patience: int = 4
    in_a_row: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    open: int = 0
    fates: list[str] | None = None
    """When given: the faults to inject, in order, whatever the call."""

    def make_backend(self, config: ClientConfig) -> Wire:
        return Wire(self)

    async def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        path = urlsplit(url).path
        fault = self._choose(path)
        await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        if fault is None:
            return await self._deliver(method, path, headers, body, timeout_s)
        self.kinds[fault] = self.kinds.get(fault, 0) + 1
        action = getattr(self, "fault_" + fault)
        reply: Reply = await action(method, path, headers, body, timeout_s)
        return reply

    def _choose(self, path: str) -> str | None:
        if self.fates is not None:
            return self.fates.pop(0) if self.fates else None
        row = self.in_a_row.get(path, 0)
        if row >= self.patience or self.rng.random() >= self.rate:
            self.in_a_row[path] = 0
            return None
        self.in_a_row[path] = row + 1
        kinds = ANYWHERE + ON_POLLS if path.endswith("/retrieve_future") else ANYWHERE
        return self.rng.choice(kinds)

    async def _deliver(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        async with asyncio.timeout(timeout_s):
            return await self.server.handle(method, path, headers, body)

    # -- before the server acts

    async def fault_reset(self, *call: Any) -> Reply:
        raise ProtocolError("connection reset by peer")

    async def fault_stall(self, *call: Any) -> Reply:
        await asyncio.sleep(call[-1])
        raise TimeoutError("no answer")

    async def fault_burst(self, *call: Any) -> Reply:
        return json_reply({"detail": "bad gateway"}, self.rng.choice([500, 502, 503, 504]))

    async def fault_blank_400(self, *call: Any) -> Reply:
        return Reply(400, {"content-length": "0"}, b"")

    async def fault_busy_seconds(self, *call: Any) -> Reply:
        return self._busy(**{"retry-after": "1.5"})

    async def fault_busy_ms(self, *call: Any) -> Reply:
        return self._busy(**{"retry-after-ms": "250"})

    async def fault_busy_date(self, *call: Any) -> Reply:
        return self._busy(**{"retry-after": email.utils.formatdate(time.time() + 3, usegmt=True)})

    async def fault_busy_absurd(self, *call: Any) -> Reply:
        return self._busy(**{"retry-after": self.rng.choice(["-5", "soon", "nan", ""])})

    def _busy(self, **headers: str) -> Reply:
        return json_reply({"detail": "slow down"}, 429, **headers)

    async def fault_timeout_408(self, *call: Any) -> Reply:
        return json_reply({"detail": "request timeout"}, 408)

    # -- after the server acted

    async def fault_lost_answer(self, *call: Any) -> Reply:
        await self._deliver(*call)
        raise ProtocolError("the server closed the connection in its body")

    async def fault_gateway_lost(self, *call: Any) -> Reply:
        await self._deliver(*call)
        return json_reply({"detail": "upstream"}, 502)

    async def fault_duplicate(self, *call: Any) -> Reply:
        await self._deliver(*call)
        return await self._deliver(*call)

    async def fault_late(self, *call: Any) -> Reply:
        reply = await self._deliver(*call)
        await asyncio.sleep(self.rng.uniform(0.5, 4.0))
        return reply

    # -- only where the contract allows it

    async def fault_try_again(self, *call: Any) -> Reply:
        body = {"type": "try_again", "request_id": "x", "queue_state": "paused_rate_limit"}
        return json_reply(body)

    async def fault_quick_408(self, *call: Any) -> Reply:
        return json_reply({"queue_state": "active"}, 408)

    async def fault_flaky_400(self, *call: Any) -> Reply:
        # At most three in a row are forgiven; a queued 408 in between resets the count.
        path = call[1]
        if self.in_a_row.get(path, 0) > 1:
            return json_reply({"queue_state": "active"}, 408)
        return json_reply({"detail": "flaky"}, 400)

    async def fault_billing(self, *call: Any) -> Reply:
        return json_reply({"detail": "payment required"}, 402)


ANYWHERE = (
    "reset stall burst blank_400 busy_seconds busy_ms busy_date busy_absurd timeout_408 "
    "lost_answer gateway_lost duplicate late"
).split()
ON_POLLS = "try_again quick_408 flaky_400 billing".split()


class Wire:
    """A backend that hands its requests to the network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        network.open += 1

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> Reply:
        return await self._network.exchange(method, url, headers, body, timeout_s)

    async def close(self) -> None:
        self._network.open -= 1

"""Throw damaged requests at every endpoint of a server: no 500, no hang, and life goes on after.

    python tests/security/fuzz.py --count 5000 --seed 1

Each endpoint gets so many requests: bodies made from the schema of its message, with fields
dropped, blown up or replaced by odd values; broken bytes; wrong types and encodings; odd paths and
queries. Half of them carry ids that exist, so that they get past the door. Calls that take protobuf
get as many damaged protobuf bodies. Prints one JSON line; what was answered wrongly ends it, with
the request to blame.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import zstandard
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "chat"))
import chat_models
from app_world import AppWorld, open_app
from wire_client import loss_of, train_body

from tinkex.wire.endpoints import ENDPOINTS

Json = Any
ODD: list[Json] = [
    None, True, False, 0, -1, 1, 1.5, -0.0, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40,
    1e308, -1e308, "", " ", "a", "toy", "NaN", "1e999", "\x00", "\ud7ff", "\u202e", "../..", "%00",
    "tinker://x/y/z", "tinker://", "9999-12-31T23:59:59Z", "0001-01-01", "a" * 3000, "' OR 1=1 --",
    [], {}, [[]], [None], [{}], {"a": {}}, {"type": "x"}, {"": ""}, [1, "a"], [2**63], [-1], [1.5],
]  # fmt: skip
ODD_TEXTS = [str(odd) for odd in ODD if not isinstance(odd, list | dict)] + [
    "1", "20", "1000", "1001", "99999999999999999999", "-9", "owned", "accessible", "2026-01-31",
    "2026-01-31T00:00:00Z", "é", "%", "%ff", "a/b", "..", "\n", "{x}", "[]", "true", "nan", "inf",
]  # fmt: skip
COMPAT: dict[str, Json] = {
    "/v1/chat/completions": {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 1.0,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "stream": False,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    "/v1/completions": {"model": "toy", "prompt": "hi", "max_tokens": 4, "logprobs": 1, "n": 1},
    "/v1/responses": {"model": "toy", "input": "hi", "max_output_tokens": 4},
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 4,
        "system": "s",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    },
}
_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
KEY = {"x-api-key": "tml-fuzz"}
PATIENCE_S = 120.0
AT_ONCE = 8
RENEW_AFTER = 400
"""Requests after which the session and the model that requests name are made anew."""
ENDLESS = "live"
"""Pages that are pushed until their reader leaves."""
SETTINGS = {
    "hold_s": 0.02,
    "max_sample_bytes": 100_000,
    "max_queued_samples": 64,
    "max_body_bytes": 4 * 1024 * 1024,
    "max_upload_bytes": 200_000,
    "power_safe": False,
}


class WrongAnswerError(AssertionError):
    """A request answered with 500, in another shape or not at all, or failed by a fault of ours."""


@dataclass
class Target:
    name: str
    method: str
    path: str
    schema: Json = None
    """Of the JSON body; None: no body of ours."""
    example: Json = None
    is_proto: bool = False
    queries: list[str] = field(default_factory=list)


def targets(world: AppWorld) -> list[Target]:
    """Every route of the application, the pages and the other APIs too."""
    rows = {(row.method, row.path): row for row in ENDPOINTS.values()}
    found = []
    for full_path, route in _routes(world.app.routes, ""):
        if ENDLESS in full_path:
            continue
        queries = [param.alias for param in route.dependant.query_params]
        for method in sorted(route.methods - {"HEAD"}):
            row = rows.get((method, full_path))
            schema = TypeAdapter(row.request).json_schema() if row and row.request else None
            path = full_path.replace(":path}", "}")
            name = row.name if row else f"{method} {full_path}"
            bare = full_path.removeprefix("/oai/api").removeprefix("/anthropic/api")
            found.append(Target(name, method, path, schema, COMPAT.get(bare), queries=queries))
            if name in ("forward_backward", "forward"):
                found.append(Target(f"{name} (protobuf)", method, path, is_proto=True))
    return found


def _routes(routes: Any, prefix: str) -> Iterator[tuple[str, APIRoute]]:
    """Routes with their whole paths; newer versions of FastAPI keep routers as they were given."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield prefix + route.path, route
        elif (inner := getattr(route, "original_router", None)) is not None:
            yield from _routes(inner.routes, prefix + route.include_context.prefix)


class Maker:
    """Requests out of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.known: dict[str, Any] = {}

    def request(self, target: Target) -> dict[str, Any]:
        headers = dict(KEY)
        body, kind = self._body(target)
        if body is not None:
            headers["content-type"] = kind
            if self.chance.random() < 0.1:
                body, headers["content-encoding"] = self._packed(body)
        if self.chance.random() < 0.3:
            headers["accept"] = self.chance.choice(
                ["application/x-protobuf", "application/json", "text/html", "*/*", "x"]
            )
        if "/messages" in target.path and self.chance.random() < 0.9:
            headers["anthropic-version"] = "2023-06-01"
        return {
            "method": target.method,
            "url": self._url(target),
            "content": body,
            "headers": headers,
        }

    def _url(self, target: Target) -> str:
        parts = []
        for part in target.path.split("/"):
            name = part.strip("{}")
            if name == part:
                parts.append(part)
            else:
                value = self._known_or_odd(name)
                # A segment of dots is resolved by every client before it is sent.
                parts.append(quote("x" if value in ("", ".", "..") else value, safe=""))
        pairs = []
        for name in target.queries:
            if self.chance.random() < 0.5:
                pairs.append(f"{name}={quote(self._known_or_odd(name), safe='')}")
        return "/".join(parts) + ("?" + "&".join(pairs) if pairs else "")

    def _known_or_odd(self, name: str) -> str:
        if name in self.known and self.chance.random() < 0.6:
            return str(self.known[name])
        return str(self.chance.choice(ODD_TEXTS))

    # -------------------------------------------------------------------------------- bodies

    def _body(self, target: Target) -> tuple[bytes | None, str]:
        if target.is_proto:
            return self._proto(), "application/x-protobuf"
        if target.method == "GET" or (target.method == "DELETE" and self.chance.random() < 0.9):
            return None, ""
        value = self._value(target)
        roll = self.chance.random()
        if roll > 0.2:
            for _ in range(self.chance.choice([0, 1, 1, 1, 2, 3])):
                value = self._broken(value)
        body = json.dumps(value).encode("utf-8", "surrogatepass")
        if roll < 0.07:
            body = self._damaged(body)
        kinds = ["application/json"] * 20 + ["application/x-protobuf", "text/plain", "", "x/y"]
        return body, self.chance.choice(kinds)

    def _value(self, target: Target) -> Json:
        if target.example is not None:
            return json.loads(json.dumps(target.example))
        if target.schema is None:
            return self._odd()
        return self._from(target.schema, target.schema.get("$defs", {}), "", 0)

    def _from(self, schema: Json, parts: Json, name: str, depth: int) -> Json:
        """A value that the schema allows, nearly always."""
        if "$ref" in schema:
            return self._from(parts[schema["$ref"].rpartition("/")[2]], parts, name, depth + 1)
        if name in self.known and self.chance.random() < 0.8:
            return copy.deepcopy(self.known[name])
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self._from(self.chance.choice(schema[key]), parts, name, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.chance.choice(schema["enum"])
        kind = schema.get("type", "object")
        kind = self.chance.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self._object(schema, parts, depth)
        if kind == "array":
            if depth > 8:
                return []
            size = self.chance.choice([0, 1, 1, 2, 3])
            size = max(size, min(schema.get("minItems", 0), 5))
            items = schema.get("items", {})
            return [self._from(items, parts, "", depth + 1) for _ in range(size)]
        if kind == "integer":
            least, most = schema.get("minimum", 0), schema.get("maximum", 100)
            return self.chance.choice([least, least + 1, 1, 2, 3, 8, min(most, 50), most])
        if kind == "number":
            return self.chance.choice([0, 0.5, 1, 1e-4, schema.get("maximum", 2.0)])
        if kind == "boolean":
            return self.chance.random() < 0.5
        if kind == "string":
            return self.chance.choice(
                ["a", "toy", "run-1", "cross_entropy", "2026-01-31T12:00:00Z"]
            )
        return None

    def _object(self, schema: Json, parts: Json, depth: int) -> Json:
        found = {}
        needed = schema.get("required", ())
        for name, inner in schema.get("properties", {}).items():
            if name in needed or (depth < 6 and self.chance.random() < 0.6):
                found[name] = self._from(inner, parts, name, depth + 1)
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict) and self.chance.random() < 0.7:
            found["a"] = self._from(extra, parts, "", depth + 1)
        return found

    def _odd(self) -> Json:
        return copy.deepcopy(self.chance.choice(ODD))

    def _broken(self, value: Json) -> Json:
        """One place of it made wrong."""
        places = list(_places(value))
        if not places:
            return self._odd()
        holder, key = self.chance.choice(places)
        roll = self.chance.random()
        if roll < 0.6:
            holder[key] = self._odd()
        elif roll < 0.7 and isinstance(holder, dict):
            del holder[key]
        elif roll < 0.8 and isinstance(holder, dict):
            holder[self.chance.choice(["x", "", "a\x00", "z" * 600, key + "_"])] = 1
        elif roll < 0.9:
            holder[key] = [holder[key]] * self.chance.choice([1, 2, 50])
        else:
            holder[key] = self._large()
        return value

    def _large(self) -> Json:
        roll = self.chance.randrange(6)
        if roll == 0:
            return "x" * 70_000
        if roll == 1:
            return list(range(20_000))
        if roll == 2:
            return {f"k{n}": n for n in range(5_000)}
        if roll == 3:
            deep: Json = 1
            for _ in range(200):
                deep = [deep]
            return deep
        return {"a": [{}] * 2000} if roll == 4 else "\u202e" * 3000

    def _proto(self) -> bytes:
        number = self.chance.choice([*range(1, 50), 10**6, 2**31 - 1])
        tokens = [self.chance.randrange(50) for _ in range(self.chance.randint(1, 8))]
        body = train_body(
            str(self.known.get("model_id", "x")),
            number,
            tokens,
            loss_fn=self.chance.choice(
                ["cross_entropy", "kl_divergence", "ppo", "importance_sampling", "x", ""]
            ),
            forward_only=self.chance.random() < 0.3,
            config=self._teacher() if self.chance.random() < 0.5 else None,
        )
        return body if self.chance.random() < 0.1 else self._damaged(body)

    def _teacher(self) -> dict[str, float | str]:
        path = str(self.known.get("path", "tinker://x/weights/y"))
        teachers = ["toy", path, *ODD_TEXTS]
        config: dict[str, float | str] = {"teacher": self.chance.choice(teachers)}
        if self.chance.random() < 0.3:
            config["teacher_coef"] = self.chance.choice([0.0, 1.0, -1.0, 1e300, "x"])
        return config

    def _damaged(self, body: bytes) -> bytes:
        broken = bytearray(body)
        for _ in range(self.chance.randint(1, 6)):
            if not broken:
                break
            place = self.chance.randrange(len(broken))
            roll = self.chance.random()
            if roll < 0.6:
                broken[place] = self.chance.randrange(256)
            elif roll < 0.8:
                del broken[place : place + self.chance.randint(1, 9)]
            else:
                broken[place:place] = self.chance.randbytes(self.chance.randint(1, 9))
        return bytes(broken)

    def _packed(self, body: bytes) -> tuple[bytes, str]:
        packed = zstandard.compress(body)
        return self.chance.choice(
            [
                (packed, "zstd"),
                (self._damaged(packed), "zstd"),
                (zstandard.compress(b"[" * 3_000_000), "zstd"),
                (body, "gzip"),
                (body, "zstd"),
            ]
        )


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every holder and key inside a value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if _is_list(item) else ()
        for key in keys:
            yield item, key
            if isinstance(item[key], dict) or _is_list(item[key]):
                waiting.append(item[key])


def _is_list(value: Json) -> bool:
    return isinstance(value, list) and len(value) < 1000


class Attack:
    """So many requests at each target of one server."""

    def __init__(self, world: AppWorld, seed: int) -> None:
        self._world = world
        self._maker = Maker(seed)
        self.statuses: Counter[int] = Counter()
        self.slowest_s = 0.0
        self._promised: dict[str, str] = {}
        """What was asked, by the id under which its result will be."""

    async def run(self, chosen: list[Target], count: int) -> None:
        for number, target in enumerate(chosen):
            print(f"{number + 1}/{len(chosen)} {target.name}", file=sys.stderr)
            for done in range(0, count, AT_ONCE):
                if done % RENEW_AFTER == 0:
                    await self._renew()
                batch = [self._maker.request(target) for _ in range(min(AT_ONCE, count - done))]
                await asyncio.gather(*(self._send(target, request) for request in batch))
        await self._look_at_results()

    async def _look_at_results(self) -> None:
        """What was taken and has ended by now did not end by a fault of ours."""
        promised, self._promised = list(self._promised.items()), {}
        for start in range(0, len(promised), AT_ONCE):
            some = promised[start : start + AT_ONCE]
            polls = (
                self._world.post("retrieve_future", {"request_id": id}, headers=KEY)
                for id, _ in some
            )
            for (_, request), answer in zip(some, await asyncio.gather(*polls), strict=True):
                if b'"category":"server"' in answer.content:
                    raise WrongAnswerError(f"{answer.text[:500]}. {request}")

    async def _renew(self) -> None:
        """End what the last requests left behind, and give the next ones ids that exist."""
        await self._look_at_results()
        world, store = self._world, self._world.service.store
        user = await store.call(store.accounts.ensure_user, "local")
        await world.parts.administration.enable(user, "local")
        await store.call(store.accounts.set_quotas, "local", {})
        world.parts.auth.forget()
        world.parts.quotas._own.clear()
        if "session_id" in self._maker.known:
            session = self._maker.known["session_id"]
            await world.parts.administration.stop_session(user, session)
        session = await world.session()
        model = await world.model(session)
        sampler = await world.ok(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"},
        )
        await world.parts.shelf.uploads.drop_old(float("inf"))
        asked = {"base_model": "toy", "lora_config": {"rank": 4}}
        upload = await world.ok("external_weights_upload_start", asked)
        file_name, url = self._maker.chance.choice(sorted(upload["urls"].items()))
        saved = {"model_id": model, "path": "one", "seq_id": 1}
        path = (await world.result(await world.ok("save_weights", saved)))["path"]
        self._maker.known = {
            "session_id": session,
            "model_id": model,
            "run_id": model,
            "base_model": "toy",
            "model": self._maker.chance.choice(
                ["toy", path, "toy:peft:64", "toy:peft:99999999", f"toy;{path}", f"x;{path}"]
            ),
            "request_id": f"{model}:1",
            "sampling_session_id": sampler["sampling_session_id"],
            "sampler_id": sampler["sampling_session_id"],
            "user_id": "local",
            "key_id": 1,
            "kind": "weights",
            "name": "one",
            "path": path,
            "tinker_path": path,
            "model_path": path,
            "source_paths": [path, path],
            "coefficients": [0.5, 0.5],
            "reference_model_path": path,
            "student_input": _PROMPT,
            "reference_input": _PROMPT,
            "target_tokens": {"data": [4, 5], "shape": [2], "dtype": "int64"},
            "weights": {"data": [1.0, 1.0], "shape": [2], "dtype": "float32"},
            "temperature": 1.0,
            "seq_id": self._maker.chance.randint(2, 60),
            "upload_id": upload["upload_id"],
            "token": url.split("/")[-2],
            "file_name": file_name,
        }

    async def _send(self, target: Target, request: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await self._world.http.request(**request)
        except TimeoutError:
            raise WrongAnswerError(f"{target.name}: no answer. {_shown(request)}") from None
        except httpx.InvalidURL:
            return
        except Exception as exc:
            raise WrongAnswerError(f"{target.name}: {exc!r}. {_shown(request)}") from exc
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        self.statuses[answer.status_code] += 1
        for promised in re.findall(rb'"request_id":"([^"]+)"', answer.content):
            self._promised[promised.decode()] = _shown(request)
        if answer.status_code >= 500:
            told = f"{answer.status_code} {answer.text[:500]}"
            raise WrongAnswerError(f"{target.name}: {told}. {_shown(request)}")
        if answer.status_code >= 400 and target.path.startswith(("/api/", "/tinkex/")):
            if b'"detail"' not in answer.content and b'"error"' not in answer.content:
                raise WrongAnswerError(f"{target.name}: {answer.text[:300]!r}. {_shown(request)}")


def _shown(request: dict[str, Any]) -> str:
    shown = dict(request)
    if shown["content"] is not None:
        shown["content"] = shown["content"][:3000]
    return repr(shown)


def talking_toy(folder: Path) -> dict[str, Any]:
    """Settings of a toy that reads and writes words, for the other APIs."""
    tokenizer = chat_models.tokenizer(chat_models.QWEN3)
    folder.mkdir()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(chat_models.QWEN3)
    return {
        "models": (str(folder),),
        "aliases": {"toy": str(folder)},
        "engine": f"toy:vocab_size={tokenizer.vocab_size}",
    }


async def attack(folder: Path, *, count: int, seed: int, only: str = "") -> dict[str, Any]:
    """Attack a server of its own; gives what was answered.

    Raises:
        WrongAnswerError: Something was answered with 500, or not at all, or failed later by a fault
            of the server.
    """
    async with open_app(folder / "data", **SETTINGS, **talking_toy(folder / "model")) as world:
        await world.facts()
        chosen = [target for target in targets(world) if only in target.name]
        started, found = time.monotonic(), Attack(world, seed)
        await found.run(chosen, count)
        model = await world.model()
        loss = loss_of(await world.result((await world.train(model, 1, [1, 2, 3])).json()))
        return {
            "endpoints": len(chosen),
            "requests": sum(found.statuses.values()),
            "statuses": dict(sorted(found.statuses.items())),
            "slowest_s": round(found.slowest_s, 2),
            "seconds": round(time.monotonic() - started, 1),
            "still_trains": loss > 0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="requests for each endpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="endpoints whose name contains this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = attack(Path(folder), count=options.count, seed=options.seed, only=options.only)
        print(json.dumps(asyncio.run(made)))


if __name__ == "__main__":
    main()

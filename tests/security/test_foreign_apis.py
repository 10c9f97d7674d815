"""A key holder at `/v1` and the console costs others nothing, and may bring a Bearer key."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz
import httpx
import pytest
from app_world import AppWorld, open_app

from tinkex.chat.tokenizer import LONG_TEXT, FastTokenizer
from tinkex.engine.sample.stopping import StopWatch
from tinkex.server.compat import dialogue, trajectories
from tinkex.server.compat.wording import AnswerText

BEARER = {"authorization": "Bearer tml-ann"}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AppWorld]:
    """A toy that reads and writes words."""
    keys = ("tml-ann=ann", "tml-bob=bob")
    settings = fuzz.talking_toy(tmp_path / "model")
    async with open_app(tmp_path / "data", api_keys=keys, **settings) as world:
        await world.facts()
        yield world


def _asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 2} | {
        **fields
    }


async def _chat(world: AppWorld, text: str, **fields: Any) -> httpx.Response:
    return await world.http.post(CHAT, json=_asked(text, **fields), headers=BEARER)


def _told(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


# ------------------------------------------------------------------------------------ accounts


async def test_what_is_asked_here_stands_in_the_ledger_of_who_asked(world: AppWorld) -> None:
    counted = (await _chat(world, "hello")).json()["usage"]
    store = world.parts.store
    store.flush()
    (used,) = await store.call(store.usage.used, "user", 0.0, 10)
    assert used.user_id == "ann"
    assert used.counts["sampling_prefill"] == counted["prompt_tokens"]
    assert used.counts["sampling_sample"] == counted["completion_tokens"]


async def test_a_spent_quota_is_refused_in_the_shape_of_the_api(tmp_path: Path) -> None:
    settings = fuzz.talking_toy(tmp_path / "model")
    quota = {"api_keys": ("tml-ann=ann",), "max_user_requests_per_minute": 2}
    async with open_app(tmp_path / "data", **quota, **settings) as world:
        world.parts.quotas._clock = lambda: 0.0
        refused = [await _chat(world, "hello") for _ in range(4)][-1]
        assert (refused.status_code, set(refused.json())) == (429, {"error"})
        body = {"model": "toy", "messages": [], "max_tokens": 2}
        headers = {**BEARER, "anthropic-version": "2023-06-01"}
        other = await world.http.post("/v1/messages", json=body, headers=headers)
        assert (other.status_code, other.json()["type"]) == (429, "error")


# ------------------------------------------------------------------------------------ bodies


async def test_a_long_conversation_with_a_bearer_key_is_served(world: AppWorld) -> None:
    """Room for a large body is reserved for whoever was let in, whichever header the key is in."""
    answer = await _chat(world, "hi " * 10_000)
    assert answer.status_code == 200, answer.text
    assert world.parts.bodies.held_bytes == 0


async def test_a_long_conversation_at_the_console_is_served(world: AppWorld) -> None:
    login = await world.http.post("/console/login", data={"key": "tml-ann"})
    assert login.status_code == 303
    page = (await world.http.get("/console/playground")).text
    token = page.split('name="form-token" content="')[1].split('"')[0]
    answer = await world.http.post(
        "/console/api/chat", json=_asked("hi " * 10_000), headers={"x-form-token": token}
    )
    assert answer.status_code == 200, answer.text


async def test_a_text_longer_than_the_model_reads_is_refused_before_it_is_checked(
    world: AppWorld,
) -> None:
    for path, body in (
        (CHAT, _asked("hi " * 40_000)),
        ("/v1/completions", {"model": "toy", "prompt": "hi " * 40_000}),
        ("/v1/messages", _asked("hi " * 40_000)),
    ):
        headers = BEARER | {"anthropic-version": "2023-06-01"}
        answer = await world.http.post(path, json=body, headers=headers)
        assert answer.status_code == 400, path
        assert "exceed the context of 32768" in _told(answer)[1]


def test_a_long_text_is_tokenized_while_other_threads_run(tmp_path: Path) -> None:
    fuzz.talking_toy(tmp_path / "model")
    tokenizer = FastTokenizer.from_folder(tmp_path / "model")
    text = "one, two; three! " * 200_000
    moments, is_done = [], threading.Event()

    def tick() -> None:
        while not is_done.wait(0.001):
            moments.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ended_at = time.monotonic()
    is_done.set()
    thread.join()
    assert len([at for at in moments if at < ended_at]) > 5
    short = text[: LONG_TEXT - 1]
    assert tokenizer.encode(short) == tokens[: len(tokenizer.encode(short))]


async def test_a_template_that_takes_longer_than_a_moment_runs_aside(
    world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogue, "MOMENT_S", 0.0)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 300
    body = _asked("") | {"messages": [*messages, messages[0]]}
    answer = await world.http.post(CHAT, json=body, headers=BEARER)
    assert answer.status_code == 200, answer.text


# ------------------------------------------------------------------------------------ answers


async def test_more_logprobs_than_an_answer_holds_are_refused_in_its_own_terms(
    world: AppWorld,
) -> None:
    few = await _chat(world, "hi", n=4, logprobs=True, top_logprobs=5)
    assert len(few.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 5
    many = {"n": 128, "max_tokens": 2000}
    for fields in ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 4}):
        status, said = _told(await _chat(world, "hi", **many, **fields))
        assert (status, "ask for fewer answers, tokens" in said) == (400, True)
    scored = {"model": "toy", "prompt": ["hi"] * 100, "n": 10, "max_tokens": 500, "logprobs": 2}
    answer = await world.http.post("/v1/completions", json=scored, headers=BEARER)
    assert "ask for fewer answers, tokens" in _told(answer)[1]


async def test_a_recorded_conversation_has_an_end(
    world: AppWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as a whole for each turn, and handed out as a whole."""
    monkeypatch.setattr(trajectories, "MAX_BYTES", 200)
    assert (await _chat(world, "hi " * 50, trajectory="long")).status_code == 200
    status, said = _told(await _chat(world, "hi", trajectory="long"))
    assert (status, "begin another" in said) == (400, True)
    assert (await _chat(world, "hi", trajectory="other")).status_code == 200
    found = await world.http.get("/api/v1/trajectories/long", headers={"x-api-key": "tml-ann"})
    (answer,) = found.json()["answers"]
    assert len(answer["tokens"]) == len(answer["logprobs"]) > 0


async def test_a_name_that_is_not_known_is_compared_with_few_and_off_the_loop(
    world: AppWorld,
) -> None:
    """Ten thousand long names of a user's own held the event loop for twenty seconds a request.

    The guard of this world's loop fails the test when anything holds it.
    """
    store, alike = world.parts.store, "ab" * 98
    for number in range(300):
        await store.call(store.names.put, "ann", f"{alike}{number:04}", "tinker://x/weights/y")
    status, text = _told(await _chat(world, "hello", model=f"{alike}x"))
    assert (status, "Did you mean" in text) == (404, True)
    status, text = _told(await _chat(world, "hello", model="tooy"))
    assert (status, "Did you mean 'toy'" in text) == (404, True)


async def test_requests_to_the_console_count_like_all_others(world: AppWorld) -> None:
    world.parts.quotas._defaults["requests_per_minute"] = 12.0
    world.parts.quotas._clock = lambda: 0.0
    key = {"x-api-key": "tml-ann"}
    statuses = [(await world.http.get("/console/api/runs", headers=key)).status_code for _ in "123"]
    assert statuses == [200, 200, 429]
    assert (await world.http.get("/api/v1/sessions", headers=key)).status_code == 429


# ------------------------------------------------------------------------------------ stops


def _chat_format() -> Any:
    """One token a character."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    return SimpleNamespace(
        end_ids=frozenset(), silent_ids=frozenset(), tokenizer=tokenizer, chat=None
    )


def _said(text: str, stops: list[str], sizes: list[int]) -> str:
    answer, pieces, at = AnswerText(_chat_format(), None, stops), [], 0
    for size in sizes:
        pieces += answer.feed([ord(letter) for letter in text[at : at + size]])
        at += size
    return "".join(piece.text for piece in [*pieces, *answer.end()])


def test_text_is_cut_at_the_first_stop_however_it_comes_in_pieces() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=30))
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 6))) for _ in range(3)]
        # Of two stops that end in the same piece the one that begins first is meant.
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        whole = text[: min(found)] if found else text
        assert _said(text, stops, [30]) == whole
        one_by_one = _said(text, stops, [1] * 30)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if found:
            first = min(ends)
            at = min(text.find(s) for s in stops if s in text[:first])
            assert one_by_one == text[:at]
        else:
            assert one_by_one == text


def test_long_stops_cost_no_more_than_the_text() -> None:
    """Comparing every overlap anew takes minutes of the event loop for these."""
    stops = [chr(ord("a") + n % 26) * 990 + str(n) for n in range(64)]
    started = time.thread_time()
    assert _said("a" * 3000, stops, [1] * 3000) == "a" * 3000
    assert time.thread_time() - started < 10


def test_the_engine_looks_for_stops_in_what_is_new() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=30))
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 8))) for _ in range(3)]
        watch = StopWatch(stops, lambda tokens: "".join(map(chr, tokens)))
        seen = [watch.seen(ord(letter)) for letter in text]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert (seen.index(True) + 1 if True in seen else None) == min(ends, default=None)

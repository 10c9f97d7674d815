"""Bytes of strangers are unpacked and rendered in a process of their own, which may die of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fuzz
import hostile_tar
import pytest
from app_world import AppWorld, open_app
from patience import soon

from tinkex.chat.template import render
from tinkex.errors import InvalidInputError
from tinkex.server.sandbox import child
from tinkex.server.sandbox.sandbox import Sandbox

HUNGRY = (
    "{% set kept = namespace(all=[]) %}{% for i in range(99999) %}"
    "{% set kept.all = kept.all + ['x' * 1000000 ~ i] %}{% endfor %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HELLO = "{{ messages[0].content }}!"


def _facts(template: str, **more: Any) -> dict[str, Any]:
    return {"template": template, "messages": [{"role": "user", "content": "héllo"}], **more}


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox(time_s=60)
    yield sandbox
    await asyncio.to_thread(sandbox.close)


def _pids(sandbox: Sandbox) -> set[int]:
    return {process.pid for process in (*sandbox._idle, *sandbox._busy)}


async def test_a_template_renders_there_as_it_does_here(sandbox: Sandbox) -> None:
    for facts in (_facts(HELLO), _facts("{{ n }}{{ messages | tojson }}", n=2**70)):
        assert await sandbox.run("ann", "render", facts) == render(**facts)
    (pid,) = _pids(sandbox)
    assert pid != os.getpid()


async def test_a_refusal_there_is_the_refusal_here(sandbox: Sandbox) -> None:
    facts = _facts("{{ raise_exception('no') }}")
    with pytest.raises(InvalidInputError) as here:
        render(**facts)
    with pytest.raises(InvalidInputError) as there:
        await sandbox.run("ann", "render", facts)
    assert (str(there.value), there.value.path) == (str(here.value), here.value.path)


async def test_a_job_that_needs_too_much_memory_is_refused_and_the_next_one_works(
    sandbox: Sandbox,
) -> None:
    with pytest.raises(InvalidInputError, match="more than"):
        await sandbox.run("eve", "render", _facts(HUNGRY))
    assert await sandbox.run("ann", "render", _facts(HELLO)) == "héllo!"


async def test_a_job_that_does_not_end_is_ended_and_the_next_one_works() -> None:
    sandbox = Sandbox(num_processes=1, time_s=0.5)
    try:
        with pytest.raises(InvalidInputError, match=r"more than 0\.5 s"):
            await sandbox.run("eve", "render", _facts(ENDLESS, max_seconds=600))
        sandbox._time_s = 60
        assert await sandbox.run("ann", "render", _facts(HELLO)) == "héllo!"
    finally:
        await asyncio.to_thread(sandbox.close)


async def test_whoever_keeps_it_busy_keeps_only_their_own_jobs_waiting(sandbox: Sandbox) -> None:
    busy = [
        asyncio.create_task(sandbox.run("eve", "render", _facts(ENDLESS, max_seconds=600)))
        for _ in range(5)
    ]
    await soon(lambda: sandbox._busy)
    assert await sandbox.run("ann", "render", _facts(HELLO)) == "héllo!"
    assert len(sandbox._busy) == 1
    assert not any(task.done() for task in busy)
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    await soon(lambda: not sandbox._busy)


async def test_a_process_that_dies_of_a_job_is_replaced(sandbox: Sandbox) -> None:
    job = asyncio.create_task(sandbox.run("eve", "render", _facts(ENDLESS, max_seconds=600)))
    await soon(lambda: sandbox._busy)
    (first,) = _pids(sandbox)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(InvalidInputError, match="send less"):
        await job
    assert await sandbox.run("ann", "render", _facts(HELLO)) == "héllo!"
    (second,) = _pids(sandbox)
    os.kill(second, signal.SIGKILL)  # between jobs: it is nobody's fault
    await soon(lambda: not sandbox._idle[0].is_alive)
    assert await sandbox.run("ann", "render", _facts(HELLO)) == "héllo!"
    assert not _pids(sandbox) & {first, second}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_the_process_has_limits_no_secrets_and_few_files(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    await sandbox.run("ann", "render", _facts(HELLO))
    (pid,) = _pids(sandbox)
    limits = Path(f"/proc/{pid}/limits").read_text()
    wanted = {
        "Max open files": str(child.MAX_FILES),
        "Max processes": "0",
        "Max core file size": "0",
    }
    for name, most in wanted.items():
        (line,) = [line for line in limits.splitlines() if line.startswith(name)]
        assert line.removeprefix(name).split()[:2] == [most, most], line
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert child.MEMORY_BYTES < int(line.split()[3]) < 2 * child.MEMORY_BYTES
    assert "Max cpu time" in limits
    assert "unlimited" not in next(x for x in limits.splitlines() if "cpu time" in x).split()[3]
    assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
    assert b"tml-secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert len(os.listdir(f"/proc/{pid}/fd")) <= 6


async def test_it_ends_with_its_server(sandbox: Sandbox) -> None:
    await sandbox.run("ann", "render", _facts(HELLO))
    (pid,) = _pids(sandbox)
    await asyncio.to_thread(sandbox.close)
    assert not Path(f"/proc/{pid}").exists()


# ------------------------------------------------------------------------------------ imports


async def _import(world: AppWorld, body: bytes) -> Any:
    return await world.post(
        "checkpoints/import", body, headers={"content-type": "application/x-tar"}
    )


async def test_an_import_is_unpacked_in_the_process(app_world: AppWorld) -> None:
    """An import that kills it is refused, and nothing of it stays."""
    sandbox = app_world.parts.sandbox
    answer = await _import(app_world, hostile_tar.plain(("a.txt", b"")))
    assert (answer.status_code, "adapter_config" in answer.text) == (400, True)
    (process,) = sandbox._idle
    os.kill(process.pid, signal.SIGSTOP)
    importing = asyncio.create_task(_import(app_world, hostile_tar.plain(("a.txt", b""))))
    await soon(lambda: sandbox._busy)
    os.kill(process.pid, signal.SIGKILL)
    answer = await importing
    assert (answer.status_code, "send less" in answer.text) == (400, True)
    answer = await _import(app_world, hostile_tar.plain(("a.txt", b"")))
    assert (answer.status_code, "adapter_config" in answer.text) == (400, True)
    for task in list(app_world.service.shelf._clearing):
        await task
    assert list((app_world.parts.config.data_dir / "checkpoints").rglob("*")) == []


# ------------------------------------------------------------------------------------ templates


async def test_large_conversations_and_tools_are_rendered_in_the_process(tmp_path: Path) -> None:
    """To the same tokens as here, where a conversation of a moment is rendered."""
    settings = fuzz.talking_toy(tmp_path / "model")
    async with open_app(tmp_path / "data", api_keys=("tml-ann=ann",), **settings) as world:
        await world.facts()
        sandbox = world.parts.sandbox
        headers = {"authorization": "Bearer tml-ann"}
        ask = {"role": "user", "content": "hi"}
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        asked = {"model": "toy", "max_tokens": 1, "return_token_ids": True}

        async def tokens(**more: Any) -> list[int]:
            answer = await world.http.post(
                "/v1/chat/completions", json={**asked, **more}, headers=headers
            )
            assert answer.status_code == 200, answer.text
            return list(answer.json()["prompt_token_ids"])

        short = await tokens(messages=[ask])
        assert not _pids(sandbox)
        assert await tokens(messages=[ask], tools=[tool]) != short
        (pid,) = _pids(sandbox)
        recorded = await tokens(messages=[ask], trajectory="one")
        assert recorded == short
        assert _pids(sandbox) == {pid}

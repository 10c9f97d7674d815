"""The base models a server offers: their names, aliases and facts.

A name on the wire becomes the name the engine knows; facts come from the engine itself
(`DescribeModelJob`) and are asked for once. With an engine that loads none and no `--model`, every
name is a model; a private server, whose user is its owner, loads whatever it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from dataclasses import replace

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.engine.jobs import DescribeModelJob, ModelInfo
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.server.process.config import ServerConfig
from tinkex.server.workers.worker import Worker, run

logger = logging.getLogger(__name__)
QUICK_S = 5.0
_WITH_CONTEXT = re.compile(r"(.+):peft:(\d{1,12})", re.DOTALL)


def split_context(name: str) -> tuple[str, int | None]:
    """A name of the hosted service, `BASE:peft:TOKENS`, as base model and length of context."""
    match = _WITH_CONTEXT.fullmatch(name) if ":peft:" in name else None
    return (match[1], int(match[2])) if match else (name, None)


class Catalog:
    def __init__(self, config: ServerConfig, worker: Worker) -> None:
        self._names = config.models or (DEFAULT_MODEL,)
        self._aliases = dict(config.aliases)
        self._is_private = bool(config.parent_pid)
        loads_models = config.engine_kind.loads_models
        self._takes_any = self._is_private or not (loads_models or config.models)
        self._worker = worker
        self._asking: dict[str, asyncio.Task[ModelInfo]] = {}
        self._asked_at: dict[str, float] = {}

    @property
    def names(self) -> list[str]:
        """Every name a client may ask for; of a private server, those that were asked for."""
        loaded = [name for name, task in self._asking.items() if _succeeded(task)]
        loaded = loaded if self._is_private else []
        return list(dict.fromkeys([*self._names, *self._aliases, *loaded]))

    def resolve(self, name: str, *, path: str = "base_model") -> str:
        """The engine's name of a base model.

        Raises:
            InvalidInputError: It is not served here; the message lists what is.
        """
        name = self._without_context(name)
        if name in self._aliases:
            return self._aliases[name]
        if name in self._names or name in self._aliases.values() or self._takes_any:
            return name
        raise InvalidInputError(
            f"no base model {name[:200]!r} is served here; served: {', '.join(self.names)}. Start "
            "the server with --model, or --alias to give a served model this name.",
            path=path,
        )

    def engine_name(self, name: str) -> str:
        """The same of a name that may be served no more, which then stays as it is."""
        name = self._without_context(name)
        return self._aliases.get(name, name)

    def _without_context(self, name: str) -> str:
        is_known = name in self._aliases or name in self._names
        return name if is_known else split_context(name)[0]

    async def check_context(self, name: str, *, path: str = "base_model") -> None:
        """Refuse a name that asks for a longer context than its model has.

        Raises:
            InvalidInputError: It does, with the length that there is; or it is not served here.
        """
        length = self._context_of(name)
        info = None if length is None else await self._info(self.resolve(name), QUICK_S)
        if length is not None and not 0 < length <= (info.max_context_length if info else length):
            most = f" of {info.max_context_length} tokens" if info else ""
            raise InvalidInputError(
                f"{name[:200]!r} asks for a context of {length} tokens; {self.resolve(name)!r} has "
                f"one{most}. Leave out `:peft:{length}`, or ask for as much as there is.",
                path=path,
            )

    def _context_of(self, name: str) -> int | None:
        return split_context(name)[1] if self._without_context(name) != name else None

    async def info(self, name: str, *, timeout_s: float = QUICK_S) -> ModelInfo | None:
        """Facts about a base model; None when the engine did not say in time.

        The context is no longer than a name with a length asks for.
        """
        info, length = await self._info(self.resolve(name), timeout_s), self._context_of(name)
        if info is None or length is None or length >= info.max_context_length:
            return info
        return replace(info, max_context_length=length)

    async def _info(self, model: str, timeout_s: float) -> ModelInfo | None:
        task = self._asking.get(model)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._asking[model] = asyncio.create_task(self._ask(model))
            self._asked_at[model] = time.monotonic()
        if task.done():
            return task.result()
        # Counted from the question, so that a thousand callers together wait only once.
        left_s = self._asked_at[model] + timeout_s - time.monotonic()
        if left_s <= 0:
            return None
        try:
            return await asyncio.wait_for(asyncio.shield(task), left_s)
        except (TimeoutError, TinkerError) as exc:
            logger.debug("no facts about %s yet: %s", model, exc)
            return None

    async def _ask(self, model: str) -> ModelInfo:
        job = DescribeModelJob(job_id=f"describe-{secrets.token_hex(8)}", base_model=model)
        info = await run(self._worker, job)
        assert isinstance(info, ModelInfo)
        return info

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)


def _succeeded(task: asyncio.Task[ModelInfo]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None

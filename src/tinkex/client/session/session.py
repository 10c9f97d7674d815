"""One session on the server: its id, its numbers, its heartbeat and its end (contract 3)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tinkex import events, types
from tinkex.client.background_loop import loop_time
from tinkex.client.http.call import Call
from tinkex.client.http.headers import CONTRACT_VERSION
from tinkex.client.http.options import CallLimits
from tinkex.client.http.transport import Transport
from tinkex.errors import APIConnectionError, APIStatusError, TinkerError
from tinkex.types.fields.bounds import storable

if TYPE_CHECKING:
    from tinkex.client.session.holder import Holder

logger = logging.getLogger("tinkex.session")

_SILENT_S = 120.0
"""A heartbeat that fails is nothing; this long without any is worth a warning."""
_FINISH_TIMEOUT_S = 20.0


class Session:
    """`is_shadow`: another process opened it, and will end it."""

    def __init__(self, session_id: str | None = None) -> None:
        self.id = session_id
        self.is_shadow = session_id is not None
        self.is_over = False
        """The server ended it, or is gone: no more heartbeats, and no goodbye."""
        self.custom_losses: dict[str, str] = {}
        """Graphs uploaded in it: name by key."""
        self._counters: dict[str, int] = {}

    def next_number(self, counter: str) -> int:
        """The next value of one of its counters (models, sampling sessions, losses)."""
        number = self._counters.get(counter, 0)
        self._counters[counter] = number + 1
        return number

    async def open(self, holder: Holder, limits: CallLimits) -> None:
        config = holder.config
        request = types.CreateSessionRequest(
            tags=list(config.tags),
            user_metadata=dict(config.user_metadata),
            sdk_version=CONTRACT_VERSION,
            project_id=config.project_id,
            display_name=config.display_name,
        )
        kind = types.CreateSessionResponse
        call = Call.to(
            "create_session", request, holder.flags.generation, pool="session", window=False
        )
        answer = await holder.ask(call.within(limits), kind)
        self.id = answer.session_id
        for level, text in (
            (logging.INFO, answer.info_message),
            (logging.WARNING, answer.warning_message),
            (logging.ERROR, answer.error_message),
        ):
            if text:
                logger.log(level, "%s", text)

    async def beat(self, transport: Transport) -> None:
        """Tell the server that we live, once."""
        assert self.id is not None
        call = Call.to(
            "session_heartbeat",
            types.SessionHeartbeatRequest.unchecked(session_id=self.id),
            transport.generation,
            pool="session",
            timeout_s=10.0,
            # No retries: the next heartbeat is one (contract 3.4).
            quick_retries=0,
            window=False,
        )
        await transport.call(call)
        events.emit("session.heartbeat", session_id=self.id)

    async def keep_alive(self, transport: Transport, interval_s: float) -> None:
        """Beat until the session is over. 410 means that it is."""
        last_success = loop_time()
        while True:
            await asyncio.sleep(interval_s)
            if self.is_over:
                return
            try:
                await self.beat(transport)
                last_success = loop_time()
            except TinkerError as exc:
                if isinstance(exc, APIStatusError) and exc.status_code == 410:
                    logger.warning("The server ended session %s.", self.id)
                    self.is_over = True
                    return
                if (silent_s := loop_time() - last_success) > _SILENT_S:
                    logger.warning("No heartbeat reached the server for %.0f s: %s", silent_s, exc)

    async def finish(
        self, transport: Transport, status: str, detail: str | None, *, is_embedded: bool
    ) -> None:
        """Say goodbye, unless the session is not ours or nobody would hear it."""
        if self.id is None or self.is_shadow or self.is_over:
            return
        try:
            request = types.FinishSessionRequest.model_validate(
                {"reason": {"type": status}, "detail": storable(detail)}
            )
            call = Call.to(
                "finish_session",
                request,
                ids={"session_id": self.id},
                timeout_s=_FINISH_TIMEOUT_S / 2,
                # Nobody starts a dead embedded server again for a goodbye.
                quick_retries=0 if is_embedded else None,
                window=not is_embedded,
            )
            async with asyncio.timeout(_FINISH_TIMEOUT_S):
                await transport.call(call)
        except (APIStatusError, APIConnectionError, TimeoutError, ValueError) as exc:
            logger.info("The session could not be finished on the server: %s", exc)

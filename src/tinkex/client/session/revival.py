"""Bring the embedded server back when it died: all who notice share one attempt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.client.session.embedded_server import LocalServer
    from tinkex.client.session.session import Session


class Revival:
    def __init__(self, server: LocalServer, session: Session) -> None:
        self.server = server
        self._session = session
        self.is_over = False
        """Nobody wants it back any more."""
        self._attempt: asyncio.Future[None] | None = None

    async def __call__(self) -> bool:
        """True once the server lives again.

        Raises:
            LocalServerError: It keeps dying; the message has its last words.
        """
        if self.is_over:
            return False
        if self._attempt is None:
            self._attempt = asyncio.ensure_future(asyncio.to_thread(self.server.revive))
            self._attempt.add_done_callback(self._ended)
        await asyncio.shield(self._attempt)
        return True

    def _ended(self, attempt: asyncio.Future[None]) -> None:
        self._attempt = None
        if not attempt.cancelled() and attempt.exception() is not None:
            self._session.is_over = True  # and whoever waits has the error

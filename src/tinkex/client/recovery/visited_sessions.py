"""The sessions that a recovering client has been in: the first, and those it opened itself.

A session that its server has lost ends, and whoever holds it moves to the newest one. A session
that still lives stays for its other clients. All of this waits for servers, so it is for the
keeper's thread; what is rebuilt where is for `recovering_client.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tinkex.client.futures import APIFuture, spawn
from tinkex.errors import TinkerError

if TYPE_CHECKING:
    from tinkex.client.session.holder import Holder

logger = logging.getLogger("tinkex.recovery")

_LEAVE_S = 15.0
"""How long to look whether a session still lives; the request itself takes ten at most."""


class VisitedSessions:
    def __init__(self, first: Holder) -> None:
        self._first = first
        """Not ours: a ServiceClient made it, and closes it."""
        self._opened: list[Holder] = []

    def enter(self, holder: Holder) -> None:
        if holder not in (self._first, *self._opened):
            self._opened.append(holder)

    def leave_gone(self, successor: Holder) -> None:
        """Work goes on in `successor`; end those sessions that can serve nobody any more."""
        known = (self._first, *self._opened)
        old = [one for one in known if one.successor is None and one is not successor]
        # All are asked before any is waited for: a dead server takes its whole timeout to say so.
        for holder, leaving in [(one, one.end_if_gone(successor)) for one in old]:
            try:
                is_gone = leaving.result(_LEAVE_S)
            except TinkerError as exc:
                logger.warning("Session %s is left as it is: %s", holder.session_id, exc)
                continue
            if is_gone and holder is not self._first:
                self._opened.remove(holder)
                close_session(holder, "errored", "its run was lost")

    def close(self, timeout_s: float) -> None:
        """Close what was opened here, except where the first session's ServiceClient lives now."""
        home = self._first.latest
        closing = [
            close_session(holder, "success") for holder in self._opened if holder is not home
        ]
        for closed in closing:
            closed.result(timeout_s)


def close_session(holder: Holder, status: str, detail: str | None = None) -> APIFuture[None]:
    return spawn(lambda waiting: holder.close(status, detail))

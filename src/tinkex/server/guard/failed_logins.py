"""Addresses that try keys which do not exist; after so many a minute they are put off.

Every way in counts here, the API's and the console's alike: otherwise the one that does not would
be where keys are tried. A valid key is served whatever others tried from the same address.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tinkex.server.process.problems import ApiError

MAX_REMEMBERED = 10_000


@dataclass(slots=True)
class _Tries:
    amount: int
    until: float


class FailedLogins:
    """Counts refused credentials by address, or by the user who names them in a request.

    `on_refused` hears of each once a minute.
    """

    MAX_A_MINUTE = 120

    def __init__(
        self,
        on_refused: Callable[[str], None] = lambda address: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_refused = on_refused
        self._clock = clock
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def put_off(self, exc: Exception, address: str) -> Exception:
        """The failure to answer an address with: a 401 too many becomes a 429."""
        if not (isinstance(exc, ApiError) and exc.status == 401):
            return exc
        too_many = self._failed(address)
        if not too_many:
            return exc
        if too_many == 1:
            self._on_refused(address)
        text = f"Too many attempts without a valid key. {exc} Wait a minute."
        return ApiError(429, text, headers={"Retry-After": "60"})

    def _failed(self, address: str) -> int:
        """Note an attempt; gives how many there were beyond what is allowed in this minute."""
        now = self._clock()
        tries = self._tries.get(address)
        if tries is None or tries.until < now:
            tries = self._tries[address] = _Tries(0, now + 60)
            while len(self._tries) > MAX_REMEMBERED:
                self._tries.popitem(last=False)
        tries.amount += 1
        return max(0, tries.amount - self.MAX_A_MINUTE)

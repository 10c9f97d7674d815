"""The numbers of one model: which are taken, by what, and what a repeat is answered.

A request is accepted once: it gets its number, is judged, written to the journal and queued in the
lane, and only then promised. The same request under the same number gets the first one's promise,
from memory while that is young, from the journal later; another request under a used number is
refused. A request that is refused uses up its number all the same, because the client counted it.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tinkex.errors import InvalidInputError
from tinkex.server.guard.budgets import NOTHING, Reservation
from tinkex.server.process.off_loop import off_loop
from tinkex.server.process.problems import ApiError
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Promise
from tinkex.server.work.lane import Lane
from tinkex.server.work.operation import Operation
from tinkex.server.work.request_queue import Numbering
from tinkex.store import NewRow, SeqConflictError, User
from tinkex.store.journal import UNNUMBERED, body_hash, result_name
from tinkex.types.fields.bounds import INT64
from tinkex.wire.requests import Opened

MAX_KNOWN = 2048
"""Numbers whose request is remembered in memory; older ones are looked up."""
MAX_GAP = 10_000
"""How far beyond the highest number known a request may be. Chunks overtake each other by tens."""


@dataclass(slots=True)
class _Taken:
    """A number that is taken."""

    digest: bytes
    accepted: asyncio.Future[str | Exception]
    """The request id, or why it was refused. Not the promise: that would keep its result."""
    reservation: Reservation = NOTHING


class Inbox:
    def __init__(self, lane: Lane, deps: Dependencies, unnumbered: Iterable[int] = ()) -> None:
        """`unnumbered`: the places of the requests so far that have no number of their client's."""
        self.lane = lane
        self._deps = deps
        self._numbering = Numbering(unnumbered)
        # Of those, by a digest of the idempotency key: a header has up to 64 KiB.
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._taken: dict[int, _Taken] = {}
        self._newest = -1  # of those taken; looking through thousands would cost every request

    async def accept(
        self,
        operation: Operation[Any],
        opened: Opened,
        user: User,
        seq_id: int | None,
        key: str | None = None,
    ) -> Promise:
        """Journal a request and queue it; the promise is durable when this returns.

        Args:
            seq_id: Its number; None takes the next one, in order of arrival.
            key: The idempotency key, by which a repeat is known that has no number.

        Raises:
            InvalidInputError: The request is refused, or its number was used for another one.
            DiskFullError: There is too little room; the number stays free.
        """
        identity = operation.identity(opened)
        digest = await off_loop(len(identity), body_hash, operation.name, identity)
        newest = max(self.lane.queue.numbers.newest, self._newest)
        place_key = _key_of_place(key)
        if operation.is_unnumbered:
            seq_id = self._places.get(place_key, newest + 1) if place_key else newest + 1
        elif seq_id is None:
            seq_id = newest + 1
        else:
            seq_id = self._numbering.place(seq_id)
        if (taken := self._taken.get(seq_id)) is not None:
            return await self._again(taken, digest, seq_id)
        if self.lane.queue.has_seen(seq_id):
            return await self._from_journal(digest, seq_id)
        self._check_number(seq_id, newest)
        # From the look above to here nothing waits, so no repeat slips in between.
        with self._take(operation, seq_id, digest) as taken:
            if operation.is_unnumbered and place_key:
                self._places[place_key] = seq_id
            row, checked = await self._judged(operation, opened, user, seq_id, taken)
            self._deps.ends.ride()
            await asyncio.wrap_future(self._deps.store.journal.append(row))
            self._deps.disk_quota.release(row.request_id)  # of a row that was there, too
            if isinstance(checked, InvalidInputError):
                self._deps.disk_quota.release(result_name(row.request_id))
                self.lane.skip(seq_id)
                raise checked
            promise = self.lane.push(row, operation, checked, taken.reservation)
            taken.accepted.set_result(promise.request_id)
        return promise

    @contextmanager
    def _take(self, operation: Operation[Any], seq_id: int, digest: bytes) -> Iterator[_Taken]:
        """The number is taken from here on; it is free again if the trouble inside is our own."""
        deps, user_id = self._deps, self.lane.model.user_id
        deps.room.require()
        deps.open_work.require(user_id)
        if operation.is_unnumbered:
            self._numbering.insert(seq_id)
        taken = self._taken[seq_id] = _Taken(digest, asyncio.get_running_loop().create_future())
        self._newest = max(self._newest, seq_id)
        self._trim()
        deps.open_work.begin(user_id)
        try:
            yield taken
        except BaseException as exc:
            deps.open_work.end(user_id)
            deps.open_work.budgets.release(taken.reservation)
            request_id = self._request_id(seq_id)
            deps.disk_quota.release(request_id)
            deps.disk_quota.release(result_name(request_id))
            # A copy: the exception itself holds the frames it passed, and with them the body.
            taken.accepted.set_result(copy.copy(exc) if isinstance(exc, Exception) else _cut_off())
            if not isinstance(exc, InvalidInputError):  # it may be sent again
                self._taken.pop(seq_id, None)
                if operation.is_unnumbered:
                    self._leave(seq_id)
                self._newest = max(self._taken, default=-1)
            raise

    def _leave(self, place: int) -> None:
        """Give up the place of a request without a number; later ones may have moved by it."""
        if self._newest == place:
            self._numbering.take_back(place)
        else:
            self.lane.skip(place)
        for key in [key for key, taken in self._places.items() if taken == place]:
            del self._places[key]

    def _request_id(self, seq_id: int) -> str:
        ending = UNNUMBERED if seq_id in self._numbering else ""
        return f"{self.lane.model.model_id}:{seq_id}{ending}"

    async def _judged(
        self, operation: Operation[Any], opened: Opened, user: User, seq_id: int, taken: _Taken
    ) -> tuple[NewRow, Any]:
        """The row of a request, and the checked request, or the error with which it is refused.

        That is journaled too: the number is used up, and a repeat is refused alike.
        """
        model, body, refused = self.lane.model, b"", None
        try:
            checked = await operation.check(opened, model, user, seq_id)
            body = operation.pack(opened, checked)
            self._admit(self._request_id(seq_id), len(body), operation.result_bytes(checked))
            whose = model.user_id, user.key_id, model.model_id
            spends = operation.spends(checked, model)
            taken.reservation = self._deps.open_work.budgets.reserve(*whose, spends)
        except InvalidInputError as exc:
            checked, refused, body = exc, str(exc), b""
        except ApiError as exc:
            if not operation.is_unnumbered:
                raise
            # Requests after it have moved already: its place is used up, whatever the trouble.
            checked, refused, body = InvalidInputError(str(exc)), str(exc), b""
        row = NewRow(
            model_id=model.model_id,
            seq_id=seq_id,
            kind=operation.name,
            request_id=self._request_id(seq_id),
            user_id=model.user_id,
            body=body,
            body_hash=taken.digest,
            refused=refused,
            key_id=user.key_id,
        )
        return row, checked

    def _admit(self, request_id: str, body_bytes: int, result_bytes: int) -> None:
        """Reserve disk for a request until its row is written, for its result until it has ended.

        Raises:
            OverQuotaError: Its user has no room for both.
        """
        quota, user_id = self._deps.disk_quota, self.lane.model.user_id
        quota.admit(request_id, user_id, body_bytes)
        if result_bytes:
            quota.admit(result_name(request_id), user_id, result_bytes)

    async def _again(self, taken: _Taken, digest: bytes, seq_id: int) -> Promise:
        """The number is known: the same request gets the same answer, another one is refused."""
        if taken.digest != digest:
            raise _conflict(seq_id)
        # Shielded: a repeat whose client hangs up must not take the first one's answer with it.
        answer = await asyncio.shield(taken.accepted)
        if isinstance(answer, Exception):
            raise copy.copy(answer)
        promise = await self._deps.results.find(answer)
        if promise is None:
            raise ApiError(410, f"The result of seq_id {seq_id} was handed out and is gone.")
        return promise

    async def _from_journal(self, digest: bytes, seq_id: int) -> Promise:
        """A number that was used before this process, or long ago."""
        model_id, journal = self.lane.model.model_id, self._deps.store.journal
        row = await self._deps.store.call(journal.find, model_id, seq_id)
        if row is None:
            raise InvalidInputError(
                f"{seq_id} of {model_id} arrived too late: later requests were given up or "
                "run without it. Send the request under a new number.",
                path="seq_id",
            )
        if row.body_hash != digest:
            raise _conflict(seq_id)
        if row.state == "refused":
            raise InvalidInputError(row.error or "The request was refused.")
        return self._deps.results.of_row(row)

    def _check_number(self, seq_id: int, newest: int) -> None:
        model_id = self.lane.model.model_id
        if seq_id > INT64:
            raise InvalidInputError(
                f"{model_id} has used its last number, {INT64}. Save its state and "
                "load it into a new model.",
                path="seq_id",
            )
        if seq_id > newest + MAX_GAP:
            raise InvalidInputError(
                f"{seq_id} is too far ahead: the highest number of {model_id} so far is {newest}, "
                f"and a request may come at most {MAX_GAP} before those between. Number requests "
                "one by one; this one was not run and its number stays free.",
                path="seq_id",
            )

    def _trim(self) -> None:
        while len(self._places) > MAX_KNOWN:
            self._places.popitem(last=False)
        while len(self._taken) > MAX_KNOWN:
            oldest = next(iter(self._taken))
            if not self._taken[oldest].accepted.done():
                return  # the journal does not know it yet, so a repeat must find it here
            del self._taken[oldest]


def _key_of_place(key: str | None) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest() if key else b""


def _conflict(seq_id: int) -> SeqConflictError:
    return SeqConflictError(
        f"seq_id {seq_id} was used before for another request. Every request needs a new number; "
        "only an exact repeat may reuse one.",
        path="seq_id",
    )


def _cut_off() -> ApiError:
    """The answer to a repeat of a request that was cancelled before it was accepted."""
    return ApiError(
        503,
        "The request was cut off before it was accepted; send it again.",
        headers={"Retry-After": "1"},
    )

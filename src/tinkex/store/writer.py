"""All writes go through one thread that commits them in groups.

Callers hand in functions of a connection and get futures. The thread takes everything that waits,
runs it in one transaction and resolves the futures after the commit, so a thousand concurrent
writers share one fsync and a future that is done means that the row is durable. When one write of
a group fails, the group is rolled back and each write runs again alone: only the wrong one fails.
A write must therefore do nothing but talk to its connection.

`bulk` writes of one handler are merged into one call (an executemany) and run before the plain
writes of the same group; the caller never depends on the order of two writes that both wait.

A `batch` is many rows in one write and with one future. Only when it fails is each row written
alone, so that one that cannot be written keeps no other from it.

Sources given to `defer` are asked about once a second for what they gathered in memory (heartbeats,
token counts): such rows may lag by a second and need no future. What a source gave and the database
could not take just now (a full disk) is kept and written first once it can; the sources gather
meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from tinkex.errors import TinkerError
from tinkex.store.claim import Fence, FencedError
from tinkex.store.stored_bytes import StoredBytes

T = TypeVar("T")
log = logging.getLogger("tinkex.store")
MAX_GROUP = 512
DEFER_S = 1.0
BulkHandler = Callable[[Connection, Sequence[Any]], Sequence[Any]]
"""Takes rows, gives one result per row; a result that is an exception fails that row's future."""


BatchHandler = Callable[[Connection, Sequence[Any]], None]


class StoreClosedError(TinkerError, RuntimeError):
    """A write arrived after the store was closed."""

    code = "store_closed"


@dataclass(slots=True)
class _Write:
    run: Callable[[Connection], Any] | None = None
    handler: BulkHandler | None = None
    row: Any = None
    batch: BatchHandler | None = None
    rows: Sequence[Any] = ()
    is_deferred: bool = False
    future: Future[Any] = field(default_factory=Future)


class GroupWriter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stored = StoredBytes()
        """Told by writes, inside their transactions, of the bytes that they store or drop."""
        # The file of SQLite stays where it is, and taking a connection from the pool costs as much
        # as a write. One over a network is taken each time: the pool looks whether it still lives.
        self._keeps_connection = engine.dialect.name == "sqlite"
        self._kept_connection: Connection | None = None
        self._waiting: deque[_Write] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._deferred: list[Callable[[], Callable[[Connection], None] | None]] = []
        self._deferred_at = time.monotonic()
        self._kept: deque[_Write] = deque()  # deferred writes that found no room
        self.fence: Fence | None = None
        self.on_fenced: Callable[[], None] | None = None
        """Told once, on the writer's thread, when another server took the database over."""
        self._thread = threading.Thread(target=self._loop, name="tinkex-store-writer", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[Connection], T]) -> Future[T]:
        return self._put(_Write(run=run))

    def run(self, run: Callable[[Connection], T]) -> T:
        """Write and wait for the commit. Blocks: never call it on an event loop."""
        return self.submit(run).result()

    def bulk(self, handler: BulkHandler, row: Any) -> Future[Any]:
        return self._put(_Write(handler=handler, row=row))

    def batch(
        self, handler: BatchHandler, rows: Sequence[Any]
    ) -> Future[list[BaseException | None]]:
        """Write rows together; the future says of each what kept it from being written."""
        return self._put(_Write(batch=handler, rows=rows))

    def defer(self, source: Callable[[], Callable[[Connection], None] | None]) -> None:
        """Ask `source` for a write once a second; it answers None when it has gathered nothing."""
        self._deferred.append(source)

    def flush(self) -> None:
        """Write what the deferred sources hold; wait until all that was handed in is committed."""
        writes = [*self._take_kept(), *self._gathered()]
        writes.append(_Write(run=lambda connection: None))  # Behind everything that waits already.
        for future in [self._put(write) for write in writes]:
            future.result()

    def close(self) -> None:
        """Commit what waits, then stop. What a full disk cannot take then is lost, and logged."""
        try:
            self.flush()
        except OperationalError as exc:
            log.error("the last heartbeats and token counts are lost: %s", exc.orig)
        except FencedError:
            pass  # logged before; they are not ours to write
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _put(self, write: _Write) -> Future[Any]:
        # Whoever waits may go away (a client hangs up); the write is made all the same, and its end
        # must find a future that can be told of it: the thread would die of one that was cancelled.
        write.future.set_running_or_notify_cancel()
        with self._wake:
            if self._closing:
                raise StoreClosedError("The store is closed; open it again before writing.")
            self._waiting.append(write)
            self._wake.notify()
        return write.future

    def _loop(self) -> None:
        while True:
            with self._wake:
                if not self._waiting and not self._closing:
                    self._wake.wait(DEFER_S)
                if not self._waiting and self._closing:
                    break
                group = [self._waiting.popleft() for _ in range(min(MAX_GROUP, len(self._waiting)))]
            group += self._due()
            if group:
                self._commit(group)
        if self._kept_connection is not None:
            self._kept_connection.close()

    def _due(self) -> list[_Write]:
        if time.monotonic() - self._deferred_at < DEFER_S:
            return []
        self._deferred_at = time.monotonic()
        # Not both: on a full disk the sources add up in memory, where a list of writes would grow.
        return self._take_kept() or self._gathered()

    def _gathered(self) -> list[_Write]:
        runs = (source() for source in self._deferred)
        return [_Write(run=write, is_deferred=True) for write in runs if write is not None]

    def _take_kept(self) -> list[_Write]:
        taken = []
        while self._kept:
            # A new write, because the future of the kept one has ended with its error.
            taken.append(_Write(run=self._kept.popleft().run, is_deferred=True))
        return taken

    def _commit(self, group: list[_Write]) -> None:
        try:
            results = self._transact(group)
        except FencedError as exc:
            log.error("%s", exc)
            for write in group:
                write.future.set_exception(exc)
            told, self.on_fenced = self.on_fenced, None
            if told is not None:
                told()
            return
        except BaseException as exc:
            if len(group) == 1 and group[0].batch is not None:
                self._commit_rows(group[0])
            elif len(group) == 1:
                log.warning("a write to the store failed: %s", exc)
                if group[0].is_deferred and isinstance(exc, OperationalError):
                    self._kept.append(group[0])
                group[0].future.set_exception(exc)
            else:
                for write in group:
                    self._commit([write])
            return
        for write, result in zip(group, results, strict=True):
            if isinstance(result, BaseException):
                write.future.set_exception(result)
            else:
                write.future.set_result(result)

    def _commit_rows(self, write: _Write) -> None:
        """Each row of a batch alone: only the wrong ones fail."""
        assert write.batch is not None
        alone = [_Write(run=_only(row, write.batch)) for row in write.rows]
        for one in alone:
            self._commit([one])
        write.future.set_result([one.future.exception() for one in alone])

    def _transact(self, group: list[_Write]) -> list[Any]:
        connection = self._kept_connection or self._engine.connect()
        self._kept_connection = None
        try:
            with connection.begin():
                results = self._write(connection, group)
            self.stored.committed()
            if self._keeps_connection:
                self._kept_connection = connection
            return results
        except BaseException:
            self.stored.rolled_back()
            raise
        finally:
            if self._kept_connection is None:
                connection.close()

    def _write(self, connection: Connection, group: list[_Write]) -> list[Any]:
        by_handler: dict[BulkHandler, list[_Write]] = {}
        for write in group:
            if write.handler is not None:
                by_handler.setdefault(write.handler, []).append(write)
        results: dict[int, Any] = {}
        if self.fence is not None:
            self.fence.check(connection)
        for handler, writes in by_handler.items():
            answers = handler(connection, [write.row for write in writes])
            results.update((id(w), a) for w, a in zip(writes, answers, strict=True))
        for write in group:
            if write.run is not None:
                results[id(write)] = write.run(connection)
            elif write.batch is not None:
                write.batch(connection, write.rows)
                results[id(write)] = [None] * len(write.rows)
        return [results[id(write)] for write in group]


def _only(row: Any, handler: BatchHandler) -> Callable[[Connection], None]:
    return lambda connection: handler(connection, [row])

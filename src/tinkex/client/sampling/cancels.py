"""Tell the server, in the background and in batches, of samples nobody waits for any more (4.3)."""

from __future__ import annotations

import asyncio
import logging

from tinkex.client.http.transport import Call, Transport

logger = logging.getLogger("tinkex.sampling")


class SampleCancels:
    """Lives on the background loop; `run` is a task of the holder's."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._is_running = False
        self.max_batch_size = 1

    def add(self, request_id: str) -> bool:
        """True for the first: it is time to `run`."""
        self._queue.put_nowait(request_id)
        is_first, self._is_running = not self._is_running, True
        return is_first

    async def run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty() and len(batch) < self.max_batch_size:
                batch.append(self._queue.get_nowait())
            results = await asyncio.gather(*map(self._cancel, batch), return_exceptions=True)
            for error in results:
                if isinstance(error, BaseException):
                    logger.info("Cancelling a sample failed: %s", error)

    async def _cancel(self, request_id: str) -> None:
        body = {"request_id": request_id}
        call = Call.json("cancel_future", body, pool="futures", timeout_s=30.0, max_retries=0)
        await self._transport.call(call)

"""A rank of a group that does what its leader tells it, in a process of its own.

Started by `leader`, never by hand. It ends when the leader does, whichever way that went: its end
of the pipe closes, or, where the system can, it is killed with its parent even while it is stopped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch

from tinkex.engine.collectives.group import Group, end, form
from tinkex.engine.device.backend import find_device, ops_for
from tinkex.engine.group import rank
from tinkex.engine.group.calls import (
    SELF,
    CallEnded,
    Go,
    GroupCall,
    PassAbandoned,
    Ref,
    Resume,
    Start,
)
from tinkex.engine.hosting import Ready, Refused
from tinkex.engine.model.base_model import ModelSource
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.fingerprint import Base
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import ConfigError, TinkerError

log = logging.getLogger(__name__)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Follower:
    def __init__(self, group: Group, pipe: Connection) -> None:
        self.group, self._pipe = group, pipe
        group.on_abandon = lambda number: pipe.send(PassAbandoned(number))
        self._objects: dict[int, Any] = {SELF: self}
        self._inbox: queue.SimpleQueue[GroupCall | Resume] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="calls", daemon=True).start()

    def _read(self) -> None:
        """In a thread, so that the leader's end is noticed in the middle of a pass too."""
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, PassAbandoned):
                self.group.note_abandoned(message.num_regroups)
            else:
                self._inbox.put(message)

    def serve(self) -> None:
        while True:
            self.window()

    def window(self) -> None:
        """Take calls until told to resume what was interrupted."""
        while not isinstance(message := self._inbox.get(), Resume):
            self._run(message)

    def _run(self, call: GroupCall) -> None:
        for number in call.gone:
            self._objects.pop(number, None)
        if call.num_collectives != self.group.num_collectives:
            end(
                f"member {self.group.rank} has taken part in {self.group.num_collectives} "
                f"collectives before {call.method}, the leader in {call.num_collectives}"
            )
        error = ""
        try:
            args = [self._objects[a.number] if isinstance(a, Ref) else a for a in call.args]
            result = getattr(self._objects[call.on], call.method)(*args)
            if call.makes is not None:
                self._objects[call.makes] = result
        except (TinkerError, OSError) as exc:
            error = f"{type(exc).__name__}: {exc}"
        except Exception as exc:
            log.exception("%s failed", call.method)
            end(f"member {self.group.rank} failed in {call.method}: {exc}")
        self._pipe.send(CallEnded(call.number, error))

    # Calls on the follower itself (`SELF`): the leader has its objects made.

    def decoder(self, source: ModelSource, dtype: torch.dtype | None) -> Decoder:
        return rank.load_shard(self.group, source, dtype)

    def trainer(
        self, decoder: Decoder, base_model: str, config: TrainerConfig | None, base: Base
    ) -> Trainer:
        return rank.make_trainer(decoder, base_model, config, base, self.window)

    def sampler(
        self, decoder: Decoder, config: SamplerConfig | None, source: ModelSource
    ) -> Sampler:
        return rank.make_sampler(decoder, config, source)


def main() -> None:
    for sig in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole process group
        signal.signal(sig, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    pipe = Connection(int(sys.argv[1]))
    try:
        start: Start = pipe.recv()
        logging.basicConfig(
            level=start.log_level,
            stream=sys.stderr,
            format=f"%(levelname)s member {start.rank}: %(message)s",
        )
        if start.threads is not None:
            torch.set_num_threads(start.threads)
        try:
            device = find_device(start.device)
        except ConfigError as exc:
            pipe.send(Refused(str(exc)))
            return
        if start.exact:
            ops_for(device).make_deterministic()
        pipe.send(Ready(os.getpid()))
        go: Go = pipe.recv()
    except (EOFError, OSError):
        return  # the leader is gone
    group = form(
        start.rank,
        start.size,
        device,
        go.file,
        exact=start.exact,
        timeout_s=start.timeout_s,
    )
    Follower(group, pipe).serve()


if __name__ == "__main__":
    # As `__main__` our classes would be pickled under a name the leader cannot import.
    from tinkex.engine.group.follower import main as run

    run()

"""The leader of a group: rank 0, inside the engine, which all other ranks follow.

It starts its followers, forms the group with them, and makes trainers and samplers whose every call
is sent to the followers first (`calls`). If a follower dies, hangs in the middle of a pass, or ends
a call in another way than the leader, the leader's process ends; see `collectives.group`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from tinkex.engine.collectives.group import MAX_MEMBERS, end, form
from tinkex.engine.group import rank as ranks
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
from tinkex.engine.lora.adapter import Adapter
from tinkex.engine.model.base_model import ModelSource, resolve
from tinkex.engine.model.decoder import Decoder, DecoderLike
from tinkex.engine.model.fingerprint import Base, Witness
from tinkex.engine.model.sharding import check_divides
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import (
    ConfigError,
    EngineError,
    ModelNotFoundError,
    NotSupportedError,
    TinkerError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
_FOLDER = "tinkex-group-"


class Leader:
    """Not thread-safe but for `close`: the engine's thread makes all calls."""

    def __init__(
        self,
        devices: Sequence[str],
        device: torch.device,
        *,
        exact: bool = False,
        threads: int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        """Start a follower for each device but the first, which is the leader's own.

        Raises:
            ConfigError: A member cannot run on its device, or the devices differ in kind.
        """
        size = len(devices)
        if not 2 <= size <= MAX_MEMBERS:
            raise ConfigError(f"a group has 2 to {MAX_MEMBERS} members, got {size} devices")
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._is_closing = False
        self._losing = threading.Lock()
        self._telling = threading.Lock()
        _clear_folders()
        self._folder = folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        try:
            for rank, name in enumerate(devices[1:], 1):
                start = Start(rank, size, name, exact, timeout_s, threads, log.getEffectiveLevel())
                self._followers.append(_spawn(start))
            self._await_ready()
            self._tell(Go(str(folder / "members")))
            group = form(0, size, device, str(folder / "members"), exact=exact, timeout_s=timeout_s)
        except BaseException:
            self._end_followers()
            raise
        group.on_loss = self._lose
        group.on_abandon = lambda number: self._tell(PassAbandoned(number))
        group.followers = self
        self.group = group
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._new_numbers = itertools.count(SELF + 1)
        self._call_numbers = itertools.count(1)
        self._is_inside = False
        self._endings: dict[int, list[str]] = {}
        self._heard = threading.Condition()
        for rank, (_, pipe) in enumerate(self._followers, 1):
            threading.Thread(
                target=self._listen, args=(rank, pipe), name=f"member-{rank}", daemon=True
            ).start()
        log.info(
            "a group of %d: %s. It runs the plain decoder, without fused kernels and graphs",
            size,
            ", ".join(devices),
        )

    # -------------------------------------------------------------------- life of the followers

    def _await_ready(self) -> None:
        for rank, (process, pipe) in enumerate(self._followers, 1):
            try:
                answer = pipe.recv()
            except (EOFError, OSError) as exc:
                code = process.wait()
                raise EngineError(
                    f"member {rank} ended with code {code} before it was ready"
                ) from exc
            if isinstance(answer, Refused):
                raise ConfigError(f"member {rank} of the group: {answer.text}")
            assert isinstance(answer, Ready)

    @property
    def pids(self) -> list[int]:
        """The process ids of the followers."""
        return [process.pid for process, _ in self._followers]

    def _listen(self, rank: int, pipe: Connection) -> None:
        while True:
            try:
                message: CallEnded | PassAbandoned = pipe.recv()
            except (EOFError, OSError):
                if not self._is_closing:
                    self._lose(f"member {rank} is gone")
                return
            if isinstance(message, PassAbandoned):
                self.group.note_abandoned(message.num_regroups)
                self._tell(message, but=rank)
            else:
                self._note(message.number, message.error)

    def _lose(self, text: str) -> NoReturn:
        if not self._losing.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process
        self._end_followers()
        end(text)

    def _end_followers(self) -> None:
        self._is_closing = True
        for process, _ in self._followers:
            process.kill()  # it may be stopped, and would not notice anything else
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the followers."""
        self._end_followers()
        for process, pipe in self._followers:
            process.wait()
            pipe.close()
        self.group.close()

    # ------------------------------------------------------------------------------------ calls

    @contextlib.contextmanager
    def call(
        self, on: Any, method: str, *args: Any, makes: int | None = None, patient: bool = False
    ) -> Iterator[None]:
        """Tell the followers to make a call; the body makes the leader's own.

        With `patient`, the call has no collective: its end is awaited for as long as it takes, and
        a follower's error is raised here.
        """
        if self._is_inside:
            yield  # inside a call that the followers make by themselves
            return
        number, gone = next(self._call_numbers), []
        while self._gone:
            gone.append(self._gone.popleft())
        self._tell(
            GroupCall(
                number=number,
                on=self._number(on),
                method=method,
                args=tuple(map(self._sent, args)),
                makes=makes,
                gone=tuple(gone),
                num_collectives=self.group.num_collectives,
            )
        )
        error, self._is_inside = "", True
        try:
            yield
        except (TinkerError, OSError) as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        except Exception as exc:
            log.exception("%s failed", method)
            self.group.on_loss(f"the leader failed in {method}: {type(exc).__name__}: {exc}")
        finally:
            self._is_inside = False
            if patient:
                self._await(number, error)
            else:
                self._note(number, error)

    def between(self, action: Callable[[], None]) -> None:
        """Make calls in the middle of one that the followers are in as well."""
        self._is_inside = False
        action()
        self._tell(Resume())
        self._is_inside = True

    def _tell(self, message: Any, but: int = 0) -> None:
        for rank, (_, pipe) in enumerate(self._followers, 1):
            if rank == but:
                continue
            try:
                with self._telling:  # abandoned passes are handed on by the threads that listen
                    pipe.send(message)
            except OSError:
                if not self._is_closing:
                    self._lose(f"member {rank} is gone")

    def _note(self, number: int, error: str) -> None:
        """Note how a rank's call ended; all ranks must agree on the kind of the end."""
        with self._heard:
            endings = self._endings.setdefault(number, [])
            endings.append(error)
            self._heard.notify_all()
            if len(endings) < self.group.size:
                return
            del self._endings[number]
        if len({_kind(ending) for ending in endings}) > 1:
            told = "; ".join(ending or "ended well" for ending in endings)
            self.group.on_loss(f"a call ended differently for its members: {told}")

    def _await(self, number: int, error: str) -> None:
        with self._heard:
            count = len(self._followers)
            self._heard.wait_for(lambda: len(self._endings.get(number, ())) == count)
            endings = self._endings.pop(number)
        theirs = next(filter(None, endings), "")
        if theirs and not error:
            raise NotSupportedError(f"another member of the group cannot: {theirs}")

    # ---------------------------------------------------------------------------------- objects

    def _number(self, thing: Any) -> int:
        return SELF if thing is self else self._numbers[thing]

    def _sent(self, arg: Any) -> Any:
        """An argument as followers get it: their own object in the place of the leader's."""
        return Ref(self._numbers[arg]) if isinstance(arg, Adapter | Decoder) else arg

    def make(
        self,
        on: Any,
        method: str,
        *args: Any,
        make: Callable[[], T],
        patient: bool = False,
    ) -> T:
        """The object that a call makes; the followers hold theirs as long as it lives."""
        number = next(self._new_numbers)
        try:
            with self.call(on, method, *args, makes=number, patient=patient):
                thing = make()
        except BaseException:
            self._gone.append(number)  # some may have it
            raise
        self._numbers[thing] = number
        weakref.finalize(thing, self._gone.append, number)
        return thing

    def load(
        self,
        source: ModelSource,
        witness: Witness | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Decoder:
        load = partial(ranks.load_shard, self.group, source, dtype, witness)
        return self.make(self, "decoder", source, dtype, make=load, patient=True)

    def trainer(
        self,
        decoder: DecoderLike,
        *,
        base_model: str,
        config: TrainerConfig | None,
        base: Base,
        after_pass: Callable[[], None],
    ) -> Trainer:
        assert isinstance(decoder, Decoder)
        args = (decoder, base_model, config, base)
        between = partial(self.between, after_pass)
        make = partial(ranks.make_trainer, *args, between)
        return self.make(self, "trainer", *args, make=make)

    def sampler(
        self, decoder: DecoderLike, config: SamplerConfig | None, source: ModelSource
    ) -> Sampler:
        assert isinstance(decoder, Decoder)
        args = (decoder, config, source)
        return self.make(self, "sampler", *args, make=partial(ranks.make_sampler, *args))


def check_models(names: Sequence[str], size: int) -> None:
    """Refuse to start a group for models that it cannot hold.

    Those that are not on this machine yet are judged when they are loaded.

    Raises:
        ConfigError: One cannot be divided evenly.
    """
    for name in names:
        try:
            check_divides(resolve(name, allow_fetch=False).config(), size, name)
        except ModelNotFoundError:
            continue
        except NotSupportedError as exc:
            raise ConfigError(str(exc)) from exc


def _clear_folders() -> None:
    """Remove what leaders that were killed left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and Path("/proc").exists() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _kind(ending: str) -> str:
    return ending.partition(":")[0]


def _spawn(start: Start) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "tinkex.engine.group.follower", str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    theirs.close()
    ours.send(start)
    return process, ours

"""Answers that the server sampled, kept for a while for those who agreed to it.

In memory only: nothing of it is on disk, and a restart forgets it. Bounded in time and bytes; who
keeps most makes room first. An answer belongs to the run whose weights gave it, at the step the
weights were saved at. When the same tokens come back to be trained on, their advantages are put
beside them: the server never learns of rewards.

On the event loop; what is long (hashing a batch, making text of tokens) is done off it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.chat.detokenizer import pieces_of
from tinkex.engine.jobs import SampleResult, TrainDatum
from tinkex.server.process.off_loop import off_loop

MAX_SNAPSHOTS = 10_000
MAX_SHOWN = 1024
"""Answers of one step that are handed out."""
MAX_SHOWN_TOKENS = 200_000
"""Tokens of those answers and their prompts together; each becomes several objects."""
OVERHEAD_BYTES = 1000
"""What an answer costs beside its arrays."""


@dataclass(slots=True, eq=False)
class Kept:
    user_id: str
    run_id: str
    step: int
    base_model: str
    snapshot: str
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    at: float
    advantages: NDArray[np.float32] | None = None

    @property
    def size_bytes(self) -> int:
        return self.prompt.nbytes + 3 * self.tokens.nbytes + OVERHEAD_BYTES

    @property
    def digest(self) -> bytes:
        return _digest(np.concatenate([self.prompt, self.tokens]))


class Rollouts:
    def __init__(
        self,
        *,
        is_on: bool,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._is_on = is_on
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._agreed: set[str] = set()
        self._snapshots: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._kept: dict[str, deque[Kept]] = {}  # of each user, oldest first
        self._sizes: dict[str, int] = {}
        self._runs: dict[str, dict[int, list[Kept]]] = {}
        self._by_digest: dict[tuple[str, bytes], list[Kept]] = {}

    # ------------------------------------------------------------------------ agreement

    def agreement(self, user_id: str) -> bool | None:
        """Whether a user's answers are kept; None: this server keeps nobody's."""
        if not self._is_on:
            return None
        return user_id in self._agreed

    def agree(self, user_id: str, yes: bool) -> None:
        """Taking it back drops what is kept."""
        if yes and self._is_on:
            self._agreed.add(user_id)
        else:
            self._agreed.discard(user_id)
            while self._kept.get(user_id):
                self._drop_oldest(user_id)

    def open_to(self, user_id: str) -> None:
        """Keep the answers of a user without asking: the one of a server that needs no key.

        Nobody but the people of this machine reaches such a server, and they may take it back.
        """
        self._is_on = True
        self._agreed.add(user_id)

    # ------------------------------------------------------------------------ what happens

    def saved(self, sampling_session_id: str, run_id: str, step: int) -> None:
        """Unnamed weights to sample from were made of a run."""
        if self._is_on:
            self._snapshots[sampling_session_id] = (run_id, step)
            if len(self._snapshots) > MAX_SNAPSHOTS:
                self._snapshots.popitem(last=False)

    def source(self, sampling_session_id: str) -> tuple[str, int] | None:
        """The run and step of unnamed weights."""
        return self._snapshots.get(sampling_session_id)

    def sampled(
        self,
        user_id: str,
        run_id: str,
        step: int,
        prompt: NDArray[Any],
        result: SampleResult,
        *,
        base_model: str,
        snapshot: str,
    ) -> None:
        if not self.agreement(user_id):
            return
        shared = prompt.astype(np.int32)
        for sequence in result.sequences:
            kept = Kept(
                user_id=user_id,
                run_id=run_id,
                step=step,
                base_model=base_model,
                snapshot=snapshot,
                prompt=shared,
                tokens=np.asarray(sequence.tokens, np.int32),
                logprobs=np.asarray(sequence.logprobs, np.float32),
                at=self._clock(),
            )
            if kept.size_bytes <= self._max_bytes:
                self._keep(kept)

    async def trained(self, user_id: str, run_id: str, data: Sequence[TrainDatum]) -> None:
        """A batch came to be trained on; it may be answers of ours, with their advantages."""
        if run_id not in self._runs or not self.agreement(user_id):
            return
        size = sum(datum.tokens.nbytes for datum in data)
        for digest, advantages in await off_loop(size, lambda: list(_judged(data))):
            for kept in self._by_digest.get((run_id, digest), ()):
                kept.advantages = advantages[-len(kept.tokens) :]

    # ------------------------------------------------------------------------ who looks

    def steps(self, run_id: str) -> list[int]:
        return sorted(self._runs.get(run_id, ()))

    def at(self, run_id: str, step: int) -> list[Kept]:
        """The first answers of a step, as many as are handed out."""
        found = self._runs.get(run_id, {}).get(step, [])[:MAX_SHOWN]
        up_to = itertools.accumulate(len(kept.prompt) + len(kept.tokens) for kept in found)
        num_shown = sum(size <= MAX_SHOWN_TOKENS for size in up_to)
        return found[: max(num_shown, 1)]

    # ------------------------------------------------------------------------ keeping

    def forget(self) -> None:
        """Drop what is too old."""
        limit = self._clock() - self._ttl_s
        for user_id in list(self._kept):
            while user_id in self._kept and self._kept[user_id][0].at < limit:
                self._drop_oldest(user_id)

    def drop_run(self, run_id: str) -> None:
        for user_id in {
            kept.user_id for kepts in self._runs.get(run_id, {}).values() for kept in kepts
        }:
            others = [kept for kept in self._kept[user_id] if kept.run_id != run_id]
            while user_id in self._kept:
                self._drop_oldest(user_id)
            for kept in others:
                self._keep(kept)

    @property
    def kept_bytes(self) -> int:
        return sum(self._sizes.values())

    def _keep(self, kept: Kept) -> None:
        self._kept.setdefault(kept.user_id, deque()).append(kept)
        self._sizes[kept.user_id] = self._sizes.get(kept.user_id, 0) + kept.size_bytes
        self._runs.setdefault(kept.run_id, {}).setdefault(kept.step, []).append(kept)
        self._by_digest.setdefault((kept.run_id, kept.digest), []).append(kept)
        while self.kept_bytes > self._max_bytes:
            self._drop_oldest(max(self._sizes, key=lambda user_id: self._sizes[user_id]))

    def _drop_oldest(self, user_id: str) -> None:
        kept = self._kept[user_id].popleft()
        self._sizes[user_id] -= kept.size_bytes
        if not self._kept[user_id]:
            del self._kept[user_id], self._sizes[user_id]
        _remove(self._by_digest, (kept.run_id, kept.digest), kept)
        steps = self._runs[kept.run_id]
        _remove(steps, kept.step, kept)
        if not steps:
            del self._runs[kept.run_id]


def _remove(table: dict[Any, list[Kept]], key: Any, kept: Kept) -> None:
    table[key].remove(kept)
    if not table[key]:
        del table[key]


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.blake2b(tokens.astype(np.int32).tobytes(), digest_size=16).digest()


def _judged(data: Sequence[TrainDatum]) -> Iterator[tuple[bytes, NDArray[np.float32]]]:
    """The whole text of each datum that has advantages, by digest, and the advantages."""
    for datum in data:
        targets, advantages = datum.inputs.get("target_tokens"), datum.inputs.get("advantages")
        if not isinstance(targets, np.ndarray) or not isinstance(advantages, np.ndarray):
            continue
        if targets.ndim == 1 and len(targets) == len(datum.tokens) == len(advantages):
            whole = np.concatenate([datum.tokens[:1], targets])
            yield _digest(whole), advantages.astype(np.float32)


async def told(kepts: Sequence[Kept], tokenizer: Any | None) -> list[dict[str, Any]]:
    """Answers as `rollouts.jsonl` has them; without a tokenizer, tokens instead of text."""
    return await asyncio.to_thread(_told, list(kepts), tokenizer)


def _told(kepts: Sequence[Kept], tokenizer: Any | None) -> list[dict[str, Any]]:
    groups: dict[bytes, tuple[int, str]] = {}
    rows = []
    for kept in kepts:
        if (digest := _digest(kept.prompt)) not in groups:
            groups[digest] = (len(groups), "".join(_pieces(tokenizer, kept.prompt.tolist())))
        group, prompt = groups[digest]
        pieces = _pieces(tokenizer, kept.tokens.tolist())
        advantages = None if kept.advantages is None else kept.advantages.tolist()
        rows.append(
            {
                "step": kept.step,
                "group": group,
                "prompt": prompt,
                "text": "".join(pieces),
                "tokens": kept.tokens.tolist(),
                "pieces": pieces,
                "logprobs": kept.logprobs.tolist(),
                "reward": None,
                "advantage": advantages[-1] if advantages else None,
                "advantages": advantages,
                "snapshot": kept.snapshot,
            }
        )
    return rows


def _pieces(tokenizer: Any | None, tokens: list[int]) -> list[str]:
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    return pieces_of(tokenizer, tokens)

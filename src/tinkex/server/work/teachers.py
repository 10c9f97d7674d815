"""Logprobs of teachers: computed by the workers that sample, and kept for the next epoch.

A datum is scored by the same job as a client's `compute_logprobs`, so its bits are the same, and
what a sample may cost, whose turn it is and what follows the loss of a worker hold for it too.
Scores are kept by what they are of: user, weights, tokens and targets. The weights are named by
their folder, which the server chose and which never changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Sequence

import numpy as np

from tinkex.contract.teachers import PATH
from tinkex.engine.jobs import TrainDatum
from tinkex.errors import InvalidInputError
from tinkex.server.guard.budgets import NOTHING
from tinkex.server.jobs.decode import TrainRequest
from tinkex.server.jobs.score_cache import arrays_of
from tinkex.server.jobs.teaching import (
    Scores,
    Teaching,
    first_scored,
    moved,
    score_job,
    scores_of,
)
from tinkex.server.process.problems import ApiError
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Promise
from tinkex.server.work.sample_run import SampleRun
from tinkex.server.work.sampling_sessions import SessionWeights
from tinkex.store import SamplingSession, User

AT_ONCE = 256
"""Datums of one request that stand in line together; a request may have very many."""


class Teachers:
    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps

    async def open(self, teaching: Teaching, user: User) -> SamplingSession:
        """The weights of a teacher, if `user` may read them now.

        Raises:
            InvalidInputError: There is no such model or checkpoint for them.
        """
        teacher, sessions = teaching.teacher, self._deps.sampling_sessions
        name = f"teacher-{secrets.token_hex(8)}"
        try:
            if teacher.is_checkpoint:
                session = await sessions.unlisted(user, name, path=teacher.name)
            else:
                self._deps.catalog.resolve(teacher.name, path="")
                session = await sessions.unlisted(user, name, base_model=teacher.name)
            self._deps.catalog.resolve(session.base_model, path="")
        except (ApiError, InvalidInputError) as exc:
            raise InvalidInputError(str(exc), path=PATH) from exc
        return session

    async def score(self, request: TrainRequest, user: User, request_id: str) -> None:
        """Fill in the scores of a request.

        Raises:
            InvalidInputError: The teacher is gone, or cannot score them.
        """
        teaching = request.teaching
        assert teaching is not None
        session = await self.open(teaching, user)
        scoring = _Scoring(self._deps, request, session, request_id)
        try:
            scores = await scoring.run()
        except ApiError as exc:
            raise InvalidInputError(str(exc), path=PATH) from exc
        teaching.scores = moved(scores, request.data) if request.references else scores
        teaching.base_model = session.base_model
        teaching.num_computed, teaching.num_cached = scoring.num_computed, scoring.num_cached
        teaching.device_seconds = scoring.device_seconds


class _Scoring:
    """The scoring of one request."""

    def __init__(
        self,
        deps: Dependencies,
        request: TrainRequest,
        session: SamplingSession,
        request_id: str,
    ) -> None:
        self._deps, self._cache, self._session = deps, deps.teacher_scores, session
        self._data, self._loss_fn = request.taught_from, request.loss_fn
        self._request_id = request_id
        self._scores: list[Scores | None] = []
        self.num_computed = self.num_cached = 0
        self.device_seconds = 0.0

    async def run(self) -> tuple[Scores, ...]:
        weights = await self._deps.sampling_sessions.weights(self._session)
        keys = await asyncio.to_thread(lambda: [self._key(datum, weights) for datum in self._data])
        missing = self._missing(keys)
        rest = iter(missing)
        workers = [
            asyncio.create_task(self._work(rest, weights))
            for _ in range(min(AT_ONCE, len(missing)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return tuple(scores for scores in self._scores if scores is not None)

    def _missing(self, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """The datums whose scores are not kept, with the key of each."""
        self._scores = [self._cache.get(key) for key in keys]
        kept = [scores is not None for scores in self._scores]
        lengths = [len(datum.tokens) + 1 for datum in self._data]
        self.num_cached = sum(length for length, known in zip(lengths, kept, strict=True) if known)
        return [entry for entry, known in zip(enumerate(keys), kept, strict=True) if not known]

    def _key(self, datum: TrainDatum, weights: SessionWeights) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        skipped = first_scored(datum, self._loss_fn)
        names = self._session.user_id, weights.base_model, weights.folder, skipped
        digest.update(repr(names).encode())
        for array in (datum.tokens, *arrays_of(datum.inputs["target_tokens"])):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()

    async def _work(self, missing: Iterator[tuple[int, bytes]], weights: SessionWeights) -> None:
        for index, key in missing:
            datum = self._data[index]
            # A job's name never repeats, also when the request is sent again.
            request_id = f"{self._request_id}:teacher-{index}-{secrets.token_hex(4)}"
            job = score_job(
                datum,
                self._loss_fn,
                job_id=f"{request_id}#1",
                base_model=weights.base_model,
                folder=weights.folder,
                user=self._session.user_id,
            )
            result = await SampleRun(
                promise=Promise(request_id, self._session.user_id, "Teacher"),
                session=self._session,
                job=job,
                on_event=None,
                key_id=None,
                is_stream=False,
                reservation=NOTHING,
                deps=self._deps,
            ).result()
            self._scores[index] = scores = scores_of(datum, self._loss_fn, result)
            self._cache.put(key, scores)
            self.num_computed += result.num_prompt_tokens - result.prompt_cache_hit_tokens
            self.num_cached += result.prompt_cache_hit_tokens
            self.device_seconds += result.device_seconds

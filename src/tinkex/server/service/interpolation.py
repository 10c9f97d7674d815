"""A checkpoint between others: their matrices, each times a coefficient, added up.

The call of MinT, in its terms: A and B of the adapters are added, each by itself. Nothing is
promised before the checkpoint is listed, so a crash loses no promise; an exact repeat joins the
work under way or finds what it made. The tensors are the engine's business.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from tinkex.engine.jobs import AdapterResult, SaveAdapterJob
from tinkex.errors import InvalidInputError
from tinkex.server.runs import idle_run
from tinkex.server.work.dependencies import Dependencies
from tinkex.server.work.futures import Outcome, Promise
from tinkex.server.workers.worker import adapter_for_a_moment, run
from tinkex.store import Checkpoint, User
from tinkex.types import InterpolateCheckpointsRequest, InterpolateCheckpointsResponse
from tinkex.types.account.checkpoints import TinkerPath, check_name

MARK = ":mix:"
"""In the id of such a promise, behind the path of the checkpoint."""
_SHAPE = ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The work of one request, as it was judged on arrival."""

    user: User
    paths: tuple[str, ...]
    coefficients: tuple[float, ...]
    folders: tuple[str, ...]
    target: TinkerPath
    request_id: str


class Interpolations:
    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps
        self._running: dict[str, asyncio.Task[Checkpoint]] = {}

    async def interpolate(self, user: User, asked: InterpolateCheckpointsRequest) -> Promise:
        """Make the checkpoint, and give the promise of it, which is kept by then.

        Raises:
            InvalidInputError: The sources do not fit, or the name is taken by something else.
            ApiError: A source is absent or somebody else's, or the user has too much open work.
        """
        if len(asked.source_paths) != len(asked.coefficients):
            raise InvalidInputError(
                f"{len(asked.coefficients)} coefficients for {len(asked.source_paths)} sources; "
                "give one for each",
                path="coefficients",
            )
        sources = await self._readable(user, asked.source_paths)
        mixture = await self._judged(user, asked, sources)
        shelf = self._deps.shelf
        done = await shelf.admit(mixture.target, overwrite=False, request_id=mixture.request_id)
        if done is None:
            # A task of its own: a client that hangs up and asks again joins it.
            task = self._running.get(mixture.request_id) or self._begin(mixture)
            done = await asyncio.shield(task)
        promise = self._deps.promises.add(_promise(done))
        self._deps.promises.settled(promise)
        return promise

    async def find(self, request_id: str) -> Promise | None:
        """The promise of that id, made again from the listed checkpoint."""
        path, mark, _ = request_id.rpartition(MARK)
        if not mark:
            return None
        store = self._deps.store
        checkpoint = await store.call(store.checkpoints.get, path)
        if checkpoint is None or checkpoint.request_id != request_id:
            return None
        return _promise(checkpoint)

    async def close(self) -> None:
        """End what is under way; nothing of it was promised."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # ------------------------------------------------------------------------ on arrival

    async def _readable(self, user: User, paths: Sequence[str]) -> list[Checkpoint]:
        """The sources, which the user may read now and whose adapters have one form."""
        shelf, resolve = self._deps.shelf, self._deps.catalog.resolve
        sources: list[Checkpoint] = []
        for index, path in enumerate(paths):
            checkpoint, where = await shelf.readable(path, user), f"source_paths[{index}]"
            await shelf.check_plain(checkpoint, path=where)
            first = sources[0] if sources else checkpoint
            if resolve(checkpoint.base_model) != resolve(first.base_model):
                raise InvalidInputError(
                    f"{path} was trained on {checkpoint.base_model!r}, {first.path} on "
                    f"{first.base_model!r}; adapters of one base model can be added",
                    path=where,
                )
            for name in _SHAPE:
                own, others = checkpoint.lora.get(name), first.lora.get(name)
                if own != others:
                    raise InvalidInputError(
                        f"{path} has {name}={own}, {first.path} has {name}={others}; only adapters "
                        "of one form can be added matrix by matrix",
                        path=where,
                    )
            sources.append(checkpoint)
        return sources

    async def _judged(
        self, user: User, asked: InterpolateCheckpointsRequest, sources: Sequence[Checkpoint]
    ) -> _Mixture:
        paths = tuple(source.path for source in sources)
        folders = tuple(source.folder for source in sources)
        coefficients = tuple(map(float, asked.coefficients))
        # Folders never repeat, so a source that was overwritten makes another checkpoint.
        work = repr((user.user_id, folders, coefficients)).encode()
        digest = hashlib.blake2b(work, digest_size=12).hexdigest()
        name = check_name(asked.output_path or f"mix-{digest}", path="output_path")
        run_id, new = sources[0].model_id, idle_run.new_run_id()
        if sources[0].user_id != user.user_id:  # nobody saves into another one's run
            store, key = self._deps.store, f"mix:{digest}:{name}"
            run_id = await store.call(store.checkpoints.remember, user.user_id, key, new)
        target = TinkerPath(run_id, "sampler_weights", name)
        return _Mixture(user, paths, coefficients, folders, target, f"{target}{MARK}{digest}")

    # ------------------------------------------------------------------------ the work

    def _begin(self, mixture: _Mixture) -> asyncio.Task[Checkpoint]:
        if str(mixture.target) in self._targets:
            raise InvalidInputError(
                f"{mixture.target} is being made of other sources; choose another name",
                path="output_path",
            )
        self._deps.room.require()
        self._deps.open_work.require(mixture.user.user_id)
        task = asyncio.create_task(self._counted(mixture))
        self._running[mixture.request_id] = task
        task.add_done_callback(lambda done: self._ended(mixture.request_id, done))
        return task

    @property
    def _targets(self) -> list[str]:
        return [request_id.rpartition(MARK)[0] for request_id in self._running]

    def _ended(self, request_id: str, done: asyncio.Task[Checkpoint]) -> None:
        self._running.pop(request_id, None)
        if not done.cancelled():
            done.exception()  # whoever asked may have hung up

    async def _counted(self, mixture: _Mixture) -> Checkpoint:
        open_work, user_id = self._deps.open_work, mixture.user.user_id
        open_work.begin(user_id)
        try:
            async with open_work.slot(user_id), self._deps.workers.training.slot(user_id):
                return await self._make(mixture)
        finally:
            open_work.end(user_id)

    async def _make(self, mixture: _Mixture) -> Checkpoint:
        # Judged again now that its turn has come: a source may be shared no longer.
        sources = await self._readable(mixture.user, mixture.paths)
        for source, before in zip(sources, mixture.folders, strict=True):
            if source.folder != before:
                raise InvalidInputError(f"{source.path} was replaced meanwhile; ask again")
        deps, target = self._deps, mixture.target
        async with deps.shelf.making(target) as folder:
            size = max(source.size_bytes for source in sources)
            deps.shelf.reserve(folder, mixture.user.user_id, size)
            saved = await self._compute(mixture, sources, folder)
            await self._add_run(mixture, sources[0])
            checkpoint = Checkpoint(
                path=str(target),
                model_id=target.run_id,
                user_id=mixture.user.user_id,
                kind=target.kind,
                name=target.name,
                folder=deps.shelf.folders.name(folder),
                size_bytes=saved.size_bytes,
                base_model=sources[0].base_model,
                lora=sources[0].lora,
                project_id=await self._project(target.run_id),
                created_at=time.time(),
                user_metadata=_metadata_of(mixture),
                request_id=mixture.request_id,
            )
            await deps.shelf.register(checkpoint)
        return checkpoint

    async def _compute(
        self, mixture: _Mixture, sources: Sequence[Checkpoint], folder: Path
    ) -> AdapterResult:
        deps, pool = self._deps, self._deps.workers.pool
        folders = [str(await deps.shelf.at_hand(source.folder)) for source in sources]
        async with adapter_for_a_moment(
            pool,
            "interpolation",
            base_model=deps.catalog.resolve(sources[0].base_model),
            folder=folders[0],
            mixture=tuple(zip(folders, mixture.coefficients, strict=True)),
        ) as (name, _):
            save = SaveAdapterJob(job_id=f"{name}-save", adapter_id=name, folder=str(folder))
            saved = await run(pool, save)
        assert isinstance(saved, AdapterResult)
        return saved

    async def _project(self, run_id: str) -> str | None:
        store = self._deps.store
        session = await store.call(store.sessions.get, run_id.split(":")[0])
        return session.project_id if session is not None else None

    async def _add_run(self, mixture: _Mixture, first: Checkpoint) -> None:
        """List a run for the result, where the first source lies in somebody else's."""
        store, run_id = self._deps.store, mixture.target.run_id
        if await store.call(store.models.get, run_id) is None:
            await idle_run.add(
                store,
                run_id,
                mixture.user,
                base_model=first.base_model,
                lora=first.lora,
                optimizer_config=first.optimizer_config,
                metadata=_metadata_of(mixture),
            )


def _metadata_of(mixture: _Mixture) -> dict[str, str]:
    """The metadata of the checkpoint, from which its promise can be made again."""
    return {
        "origin": "interpolation",
        "sources": " ".join(mixture.paths),
        "coefficients": " ".join(map(repr, mixture.coefficients)),
    }


def _promise(checkpoint: Checkpoint) -> Promise:
    metadata = checkpoint.user_metadata or {}
    answer = InterpolateCheckpointsResponse(
        path=checkpoint.path,
        source_paths=str(metadata["sources"]).split(),
        coefficients=list(map(float, str(metadata["coefficients"]).split())),
    )
    request_id = str(checkpoint.request_id)
    promise = Promise(request_id, checkpoint.user_id, "MintInterpolateCheckpoints")
    promise.settle(Outcome(payload=orjson.dumps(answer.model_dump())))
    return promise

"""The base models that an engine holds, what runs over each, and which adapter is of which.

A base is loaded when something first needs it. When there are too many, those that nothing uses are
forgotten, the longest unused first. In a group of devices the leader makes decoder, trainer and
sampler. Knows nothing of queues and turns.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tinkex.engine import jobs
from tinkex.engine.device.backend import load_decoder, warm_up
from tinkex.engine.heartbeat import Heartbeat
from tinkex.engine.model import packed_weights
from tinkex.engine.model.base_model import ModelSource, resolve
from tinkex.engine.model.decoder import Decoder, DecoderLike
from tinkex.engine.model.fingerprint import Base, fingerprint, witness_of
from tinkex.engine.numerics.memory_in_use import tensor_bytes
from tinkex.engine.reports import tell
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.sample.stopping import load_detokenizer
from tinkex.engine.torch.config import EngineConfig
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.trainer import Trainer
from tinkex.errors import InvalidInputError

if TYPE_CHECKING:
    from tinkex.engine.group.leader import Leader

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ResidentBase:
    """A base model in memory and what runs over it."""

    name: str
    source: ModelSource
    decoder: DecoderLike
    trainer: Trainer
    identity: Base
    size_bytes: int
    sampler: Sampler | None = None
    """Made for the first sample, and given up with its memory when nothing came for long."""


class Bases:
    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        heartbeat: Heartbeat,
        *,
        after_pass: Callable[[], None],
        on_forgotten: Callable[[str], None],
    ) -> None:
        """`after_pass` is for the trainers; `on_forgotten` is told the name of a base that went."""
        self.loaded: OrderedDict[str, ResidentBase] = OrderedDict()
        self._config, self._device, self._heartbeat = config, device, heartbeat
        self._after_pass, self._on_forgotten = after_pass, on_forgotten
        self._base_of: dict[str, str] = {}
        self._leader = _lead(config, device)

    def find(self, name: str, job_id: str, emit: jobs.Emit) -> ResidentBase:
        """A base by its name, loaded now when it is not resident; the job is told how far it is."""
        if name not in self.loaded:
            self._make_room()
            self.loaded[name] = self._load(name, job_id, emit)
        self.loaded.move_to_end(name)
        return self.loaded[name]

    def _load(self, name: str, job_id: str, emit: jobs.Emit) -> ResidentBase:
        said = f"loading {name}"

        def tell_percent(percent: int) -> None:
            tell(emit, jobs.Progress(job_id=job_id, text=f"{said} {percent} %"))

        tell(emit, jobs.Progress(job_id=job_id, text=said))
        with self._heartbeat.work(job_id, is_loading=True):
            source = resolve(name)
            if source.note:
                log.log(logging.WARNING if source.stands_in else logging.INFO, source.note)
            warmed = None if self._leader is not None else warm_up(source, self._device)
            witness = witness_of(source, tell_percent)
            if self._leader is not None:
                decoder: DecoderLike = self._leader.load(source, witness)
            else:
                decoder = load_decoder(source, device=self._device, weights=witness)
            identity = Base(name, fingerprint(source, witness), self._config.any_base)
            log.info("loaded %s, fingerprint %s", name, identity.fingerprint)
            if warmed is not None:
                warmed.wait()
        trainer = self._trainer(decoder, name, identity)
        return ResidentBase(name, source, decoder, trainer, identity, tensor_bytes(decoder))

    def _trainer(self, decoder: DecoderLike, name: str, base: Base) -> Trainer:
        config, after_pass = self._config.trainer, self._after_pass
        if self._leader is not None:
            return self._leader.trainer(
                decoder, base_model=name, config=config, base=base, after_pass=after_pass
            )
        config = config or TrainerConfig.for_device(
            decoder.ops, deterministic=self._config.deterministic
        )
        return Trainer(decoder, base_model=name, config=config, base=base, after_pass=after_pass)

    def sampler(self, base: ResidentBase) -> Sampler:
        if base.sampler is None:
            base.sampler = self._sampler(base)
        return base.sampler

    def _sampler(self, base: ResidentBase) -> Sampler:
        config, folder = self._config.sampler, base.source.path
        if self._leader is not None:
            return self._leader.sampler(base.decoder, config, base.source)
        config = config or SamplerConfig.for_device(
            base.decoder.ops, deterministic=self._config.deterministic
        )
        return Sampler(base.decoder, config, detokenizer=lambda: load_detokenizer(folder))

    def _make_room(self) -> None:
        """Forget bases that nothing uses, the longest unused first."""
        for name, base in list(self.loaded.items()):
            if len(self.loaded) < self._config.max_models:
                return
            if not base.trainer.adapters and (base.sampler is None or not base.sampler.has_work):
                del self.loaded[name]
                self._on_forgotten(name)

    # ------------------------------------------------------------------------------- adapters

    def of(self, adapter_id: str) -> ResidentBase | None:
        """The base of an adapter; None of one that is not loaded."""
        name = self._base_of.get(adapter_id)
        return None if name is None else self.loaded[name]

    def trainer_of(self, adapter_id: str) -> Trainer:
        if (base := self.of(adapter_id)) is not None:
            return base.trainer
        loaded = ", ".join(map(repr, sorted(self._base_of))) or "none"
        raise InvalidInputError(
            f"No adapter {adapter_id!r} is loaded; loaded: {loaded}. Create it, or load a "
            "checkpoint into it, first."
        )

    def adopt(self, adapter_id: str, base_model: str) -> None:
        """Note whose adapter it is; one that moved to another base leaves the old one."""
        previous = self.of(adapter_id)
        if previous is not None and previous.name != base_model:
            previous.trainer.drop(adapter_id)
        self._base_of[adapter_id] = base_model

    def drop(self, adapter_id: str) -> None:
        if (base := self.of(adapter_id)) is not None:
            del self._base_of[adapter_id]
            base.trainer.drop(adapter_id)

    # ------------------------------------------------------------------------------- all of them

    def sampling(self) -> list[Sampler]:
        """The samplers that have something to do."""
        samplers = [base.sampler for base in self.loaded.values()]
        return [sampler for sampler in samplers if sampler is not None and sampler.has_work]

    def held_bytes(self) -> dict[str, int]:
        """Bytes in use by purpose, as in `heartbeat.KINDS`."""
        bases = self.loaded.values()
        decoders = [base.decoder for base in bases if isinstance(base.decoder, Decoder)]
        samplers = [base.sampler for base in bases if base.sampler is not None]
        return {
            "base": sum(base.size_bytes for base in bases),
            "packed": sum(packed_weights.held_bytes(each.matrices()) for each in decoders),
            "kv": sum(tensor_bytes(each.cache, each.states) for each in samplers),
            "adapters": sum(tensor_bytes(base.trainer.adapters) for base in bases),
        }

    def rest(self) -> None:
        """Give up what can be made again. A GPU keeps it: its memory is nobody else's."""
        if self._device.type != "cpu":
            return
        for base in self.loaded.values():
            base.sampler = None
            if isinstance(base.decoder, Decoder):
                packed_weights.unpack(base.decoder.matrices())

    def close(self) -> None:
        self.loaded.clear()
        if self._leader is not None:
            self._leader.close()


def describe(name: str) -> jobs.ModelInfo:
    """A base model as it is on disk, fetched where it has to be; nothing is loaded."""
    source = resolve(name)
    config = source.config()
    return jobs.ModelInfo(
        base_model=name,
        arch=config.arch,
        vocab_size=config.vocab_size,
        max_context_length=config.max_context_length,
        tokenizer_id=str(source.path),
        eos_token_ids=config.eos_token_ids,
        experts=config.routing,
        note=source.note,
        stands_in=source.stands_in,
    )


def _lead(config: EngineConfig, device: torch.device) -> Leader | None:
    """The leader of the engine's group; None without one."""
    if not config.group:
        return None
    from tinkex.engine.group.leader import Leader

    return Leader(
        config.group,
        device,
        exact=config.deterministic,
        threads=config.threads,
        timeout_s=config.group_timeout_s,
    )

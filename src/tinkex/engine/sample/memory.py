"""The device memory of a sampler: how much of what, and how its decoder attends over it.

Pages hold keys and values, and for mixtures the experts that each token passed. Models with delta
layers have slots of states as well. `kv_cache` and `state_pool` say who has which part.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.engine.model import packed_weights
from tinkex.engine.model.decoder import Decoder, DecoderLike
from tinkex.engine.sample.config import SamplerConfig
from tinkex.engine.sample.expert_pages import ExpertPages
from tinkex.engine.sample.kv_cache import BlockPool
from tinkex.engine.sample.paged import PagedAttend, PagedCache, kv_bytes_per_token
from tinkex.engine.sample.paged_decoder import PagedDecoder, PassAttend, RecordedSteps
from tinkex.engine.sample.state_pool import StatePool
from tinkex.engine.sample.states import StateCache, state_bytes


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Pages and slots of one sampler, with the pools that hand them out."""

    cache: PagedCache
    blocks: BlockPool
    states: StateCache | None
    """None for models without delta layers, as `state_pool`."""
    state_pool: StatePool | None
    experts: ExpertPages | None
    """None for models that are no mixture."""
    max_running: int
    """Sequences that may run at once: with delta layers no more than there are slots."""
    num_tokens: int
    """That fit the pages."""

    @staticmethod
    def of(decoder: DecoderLike, config: SamplerConfig) -> SamplerMemory:
        """Allocate what the config allows, and no more than all sequences together can fill."""
        model, size = decoder.config, config.block_size
        per_token = kv_bytes_per_token(model, decoder.dtype)
        if (routing := model.routing) is not None:
            per_token += 2 * routing.layers * routing.per_token  # int16 each
        states, state_pool = _states(decoder, config)
        max_running = config.max_running if state_pool is None else state_pool.num_live
        kv_bytes = config.kv_bytes - (0 if states is None else states.size_bytes)
        enough = max_running * -(-model.max_context_length // size)
        num_blocks = max(1, min(kv_bytes // (size * per_token), enough))
        experts = None
        if routing is not None:
            experts = ExpertPages(model, num_blocks, size, decoder.device)
        return SamplerMemory(
            cache=PagedCache(model, num_blocks, size, decoder.device, decoder.dtype),
            blocks=BlockPool(num_blocks, size),
            states=states,
            state_pool=state_pool,
            experts=experts,
            max_running=max_running,
            num_tokens=num_blocks * size,
        )

    def attention(
        self, decoder: DecoderLike, *, exact: bool
    ) -> tuple[PassAttend, RecordedSteps | None]:
        """The decoder's own way to attend over pages and to record steps, or the plain one."""
        if isinstance(decoder, PagedDecoder):
            return decoder.paged(self.cache, self.states, self.experts)
        exact = exact and decoder.ops.fills_rows
        return PagedAttend(self.cache, self.states, exact=exact), None


def _states(
    decoder: DecoderLike, config: SamplerConfig
) -> tuple[StateCache | None, StatePool | None]:
    """Room for the states of delta layers: half for what runs, half for saved ones, and no more
    than half of the memory that keys, values and states have together."""
    if not (size_bytes := state_bytes(decoder.config, decoder.dtype)):
        return None, None
    count = max(2, min(2 * config.max_running, config.kv_bytes // 2 // size_bytes))
    pool = StatePool(count // 2, count - count // 2)
    return StateCache(decoder.config, count, decoder.device, decoder.dtype), pool


def pack_weights(decoder: DecoderLike, config: SamplerConfig) -> bool:
    """Make the copies that decoding on a CPU is faster with; False where there are none."""
    wanted = config.packed_weights and not config.exact
    if not wanted or not isinstance(decoder, Decoder):
        return False
    return packed_weights.pack(decoder.matrices())

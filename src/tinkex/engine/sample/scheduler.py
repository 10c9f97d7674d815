"""Decide which tokens run in the next forward pass.

`Scheduler` owns the waiting and running queues and the blocks of KV. It sees token counts, token
ids and adapter versions, never tensors or HTTP, so its tests need no model. Every pass advances
each running sequence: by one token when it decodes, by a chunk of its prompt while it is being
prefilled, so neither waits for the other. Sequences are admitted in the order they came. When KV
runs out, the one admitted last loses its blocks, returns to the front of the queue and is prefilled
again; the oldest always makes progress.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkex.engine.sample.kv_cache import BlockPool, Key, chain_key, root_key
from tinkex.engine.sample.state_pool import Copy, StatePool
from tinkex.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    max_running: int = 256
    """Most sequences in one pass; the others wait."""
    max_pass_tokens: int = 512
    """Most tokens in one pass; a longer prompt is prefilled in several passes."""

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_pass_tokens < 1:
            raise ConfigError(
                "sampler.max_running and sampler.max_pass_tokens must be at least 1, got "
                f"{self.max_running} and {self.max_pass_tokens}"
            )


@dataclass(eq=False, slots=True)
class Seq:
    """A sequence being sampled. The scheduler owns all of it but `tokens`, which grow outside."""

    version: str
    """Adapter version: equal strings have equal weights. Computed here, never read in a file."""
    tokens: list[int]
    """Prompt, then what was sampled so far."""
    num_reusable: int
    """How many of the first tokens may come from the prefix cache; the rest must be computed."""
    tenant: str = ""
    """Whose it is. Prefixes are shared within a tenant: a hit would tell what others prompted."""
    folder: str = ""
    """Where its adapter was read from; rows of one folder are neighbours in a pass."""
    trial: str = ""
    """Its job, if no other may share a pass with it: an engine died with that job before."""
    followers: list[Seq] = field(default_factory=list)
    """Samples of the same prompt, which fork from this one when its prompt is done."""
    num_prompt: int = field(init=False)
    num_cached: int = 0
    """Tokens whose keys and values are in `blocks`."""
    num_hit: int = 0
    """Prompt tokens found in the prefix cache when first admitted."""
    blocks: list[int] = field(default_factory=list)
    state: int = -1
    """Slot of its delta layers' states, while it runs; -1: it has none."""
    _keys: list[Key] = field(default_factory=list)
    _admitted_before: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    def keys(self, num_blocks: int, block_size: int) -> list[Key]:
        """The keys of the first `num_blocks` full blocks."""
        while len(self._keys) < num_blocks:
            parent = self._keys[-1] if self._keys else root_key(f"{self.tenant}\0{self.version}")
            start = len(self._keys) * block_size
            self._keys.append(chain_key(parent, self.tokens[start : start + block_size]))
        return self._keys[:num_blocks]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of a sequence, to be computed in this pass."""

    seq: Seq
    start: int
    length: int

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.start + self.length == len(self.seq.tokens)


@dataclass(frozen=True, slots=True)
class Fork:
    """A follower now runs. `copy` = (from, to): its last block is partly filled, copy it.

    `state` is the same for the slot of its delta layers' states.
    """

    seq: Seq
    copy: tuple[int, int] | None
    state: tuple[int, int] | None = None


class Scheduler:
    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, states: StatePool | None = None
    ) -> None:
        """`states` has a slot for each of `max_running`; None: the model has no delta layers."""
        self.config, self.pool, self.states = config, pool, states
        self._restores: list[Copy] = []
        self._saves: list[Copy] = []
        self.waiting: deque[Seq] = deque()
        self.running: list[Seq] = []
        self._tenants: set[str] = set()  # of all that came since the last time nobody was here
        self._trials: set[str] = set()
        self._last_trial = ""
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, seq: Seq) -> None:
        if not self:
            self._tenants.clear()
        self._tenants.add(seq.tenant)
        if seq.trial:
            self._trials.add(seq.trial)
        self.waiting.append(seq)

    def remove(self, seq: Seq) -> None:
        """Take a sequence out, finished or cancelled, and free its blocks at once."""
        if seq in self.running:
            self.running.remove(seq)
            self._free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def plan(self) -> list[Chunk]:
        """The next pass. Decoding sequences come first, then prompts in the order admitted."""
        # Who runs is served before newcomers: the other way round a newcomer would take the block
        # that a running sequence needs now, and one of the two would be preempted at once.
        trial = self.next_trial
        self._grow()
        self._admit()
        decoding, prefilling = [], []
        chosen = self._together(trial)
        for seq in chosen:
            if seq.num_cached >= seq.num_prompt and len(seq.tokens) - seq.num_cached == 1:
                decoding.append(Chunk(seq, seq.num_cached, 1))
        # Decoding is never cut short, whatever the budget: one token each costs little, and a
        # stalled stream is what users notice. Prompts share the rest, and always get something.
        room = max(self.config.max_pass_tokens - len(decoding), 1)
        in_flight: set[Key] = set()
        for seq in chosen:
            if room > 0 and (chunk := self._prefill(seq, room, in_flight)) is not None:
                prefilling.append(chunk)
                room -= chunk.length
        return decoding + prefilling

    @property
    def has_trial(self) -> bool:
        """Whether a job is here that shares its passes with no other."""
        return bool(self._trials)

    @property
    def next_trial(self) -> str:
        """The job that has the next pass alone; empty when the next one is shared.

        They take turns with those that share, so that nobody waits for the end of a trial.
        """
        if not self._trials:
            return ""
        trials = sorted({seq.trial for seq in self.running})
        if not trials:
            return self._next().trial if self.waiting else ""
        return next((trial for trial in trials if trial > self._last_trial), trials[0])

    def _together(self, trial: str) -> list[Seq]:
        """The running sequences that share the next pass."""
        if not self._trials:
            return self.running
        self._trials &= {seq.trial for seq in (*self.running, *self.waiting)}
        if not any(seq.trial == trial for seq in self.running):
            trial = self.next_trial  # all of the one before were preempted
        self._last_trial = trial
        return [seq for seq in self.running if seq.trial == trial]

    def plan_ahead(self, decoding: Sequence[Seq]) -> list[Chunk]:
        """The pass after one that is not read yet, for those of its sequences that go on.

        Empty when it cannot be planned without knowing what was drawn: a sequence that waits could
        be admitted, or there is no block for each that needs one.
        """
        if self._trials:  # the next pass is another's
            return []
        is_full = len(self.running) >= self.config.max_running
        if self.waiting and (not is_full or self._may_displace(self._next())):
            return []
        # Blocks for all or for none: to preempt someone, what was drawn must be known, since a
        # sequence that ends with it gives its blocks back.
        full = [seq for seq in decoding if seq.num_cached == len(seq.blocks) * self.pool.block_size]
        if (more := self.pool.allocate(len(full))) is None:
            return []
        for seq, block in zip(full, more, strict=True):
            seq.blocks.append(block)
        return [Chunk(seq, seq.num_cached, 1) for seq in decoding]

    def _prefill(self, seq: Seq, room: int, in_flight: set[Key]) -> Chunk | None:
        """The next chunk of a sequence that is not decoding yet.

        None when another sequence computes the same block in this pass: in the next pass that
        block is shared instead. So prompts that arrive together are computed once.
        """
        left, size = len(seq.tokens) - seq.num_cached, self.pool.block_size
        if left == 1 and seq.num_cached >= seq.num_prompt:
            return None
        if self.states is not None:
            return self._prefill_from_state(self.states, seq, room, in_flight)
        num_shareable = min(seq.num_reusable, len(seq.tokens) - 1) // size
        keys = seq.keys(num_shareable, size)
        while seq.num_cached % size == 0 and (at := seq.num_cached // size) < num_shareable:
            if keys[at] in in_flight:
                return None
            if not (shared := self.pool.match(keys[at : at + 1])):
                break
            # Another sequence computed this block since admission: take its block, return our own.
            self.pool.release([seq.blocks[at]])
            seq.blocks[at] = shared[0]
            seq.num_cached += size
            seq.num_hit += size
        length = min(len(seq.tokens) - seq.num_cached, room)
        last = (seq.num_cached + length) // size
        in_flight.update(seq.keys(last, size)[seq.num_cached // size :])
        return Chunk(seq, seq.num_cached, length)

    def _prefill_from_state(
        self, states: StatePool, seq: Seq, room: int, in_flight: set[Key]
    ) -> Chunk | None:
        """Like `_prefill`, where blocks can be shared only up to one whose state is saved.

        Chunks end with a block wherever they can, since that is where a state is worth saving.
        """
        size, at = self.pool.block_size, seq.num_cached // self.pool.block_size
        num_shareable = min(seq.num_reusable, len(seq.tokens) - 1) // size
        if seq.num_cached % size == 0 and at < num_shareable:
            keys = seq.keys(num_shareable, size)
            if keys[at] in in_flight:
                return None
            num_found, _ = self.pool.num_idle_of(keys[at:])
            count, slot = states.longest(keys[: at + num_found])
            if count > at:
                self.pool.release(seq.blocks[at:count])
                seq.blocks[at:count] = self.pool.match(keys[at:count])
                seq.num_hit += count * size - seq.num_cached
                seq.num_cached = count * size
                self._restores.append((slot, seq.state))
        stop = min(len(seq.tokens), seq.num_cached + room)
        whole = min(stop, len(seq.tokens) - 1) // size * size
        if whole > seq.num_cached:
            stop = whole
        in_flight.update(seq.keys(stop // size, size)[seq.num_cached // size :])
        return Chunk(seq, seq.num_cached, stop - seq.num_cached)

    def take_restores(self) -> list[Copy]:
        """States to copy before the pass just planned."""
        copies, self._restores = self._restores, []
        return copies

    def take_saves(self) -> list[Copy]:
        """States to copy after the pass whose chunks are done."""
        copies, self._saves = self._saves, []
        return copies

    def _save_state(self, chunk: Chunk) -> None:
        seq, size = chunk.seq, self.pool.block_size
        stop = chunk.start + chunk.length
        if self.states is None or stop % size or chunk.start >= seq.num_prompt:
            return
        if (slot := self.states.save(seq.keys(stop // size, size)[-1])) is not None:
            self._saves.append((seq.state, slot))

    def done(self, chunk: Chunk) -> None:
        """Record that a chunk's keys and values are in the cache, and offer its full blocks."""
        seq, size = chunk.seq, self.pool.block_size
        self._save_state(chunk)
        first = seq.num_cached // size
        seq.num_cached = chunk.start + chunk.length
        last = seq.num_cached // size
        # Offered now and not when they were planned: before the pass there is nothing in them.
        if last > first:
            for i, key in enumerate(seq.keys(last, size)[first:], first):
                self.pool.publish(seq.blocks[i], key)

    def fork(self, leader: Seq) -> list[Fork]:
        """Start the followers of a sequence whose prompt is in the cache, sharing its full blocks.

        One that finds no room goes to the front of the queue; the prefix cache serves it later.
        """
        forks: list[Fork] = []
        late: list[Seq] = []
        for seq in leader.followers:
            # Once one is late the rest wait behind it, so that samples start in their order.
            fork = None if late else self._fork_one(leader, seq)
            if fork is None:
                late.append(seq)
            else:
                forks.append(fork)
        self.waiting.extendleft(reversed(late))
        leader.followers = []
        return forks

    def _fork_one(self, leader: Seq, seq: Seq) -> Fork | None:
        size, num_tokens = self.pool.block_size, leader.num_cached
        if len(self.running) >= self.config.max_running:
            return None
        # Full blocks never change and are shared. The last one, if partly filled, will be written
        # by both, so the follower needs a copy.
        num_full = num_tokens // size
        own = self.pool.allocate(self.pool.blocks_for(num_tokens) - num_full)
        if own is None:
            return None
        shared = leader.blocks[:num_full]
        self.pool.share(shared)
        seq.blocks = shared + own
        seq.num_cached, seq.num_hit, seq._admitted_before = num_tokens, num_tokens, True
        seq._keys = leader.keys(num_full, size).copy()
        self.running.append(seq)
        copy = (leader.blocks[num_full], own[0]) if own else None
        if self.states is None:
            return Fork(seq, copy)
        seq.state = self.states.take()
        return Fork(seq, copy, (leader.state, seq.state))

    def _admit(self) -> None:
        """Move waiting sequences to running while there is room: tenants in turn, each in order.

        One that does not fit is not overtaken by smaller ones: under load it would wait for ever.
        """
        while self.waiting:
            seq = self._next()
            if not self._start(seq) and not self._make_way(seq):
                return

    def _start(self, seq: Seq) -> bool:
        """Let a waiting sequence run; False, changing nothing, when there is no room for it."""
        if len(self.running) >= self.config.max_running:
            return False
        size = self.pool.block_size
        # The last token is always computed: its hidden state gives the next token.
        num_reusable = min(seq.num_reusable, len(seq.tokens) - 1) // size
        keys = seq.keys(num_reusable, size)
        num_found, num_idle = self.pool.num_idle_of(keys)
        saved = -1
        if self.states is not None:
            # Keys and values alone do not help: the prefix counts as far as a state is saved.
            num_found, saved = self.states.longest(keys[:num_found])
            keys = keys[:num_found]
            num_found, num_idle = self.pool.num_idle_of(keys)
        # One token more than there are: the first that will be sampled needs a cell too.
        needed = self.pool.blocks_for(len(seq.tokens) + 1) - num_found
        # Leave one block to each running sequence, or the newcomer is preempted at once. Cached
        # blocks of this very prefix count as available, and are about to be taken.
        spare = len(self.running)
        if self.pool.num_available - num_idle < needed + spare:
            return False
        self.waiting.remove(seq)
        blocks = self.pool.match(keys)
        fresh = self.pool.allocate(self.pool.blocks_for(len(seq.tokens)) - num_found)
        assert fresh is not None
        seq.blocks = blocks + fresh
        seq.num_cached = num_found * size
        if self.states is not None:
            seq.state = self.states.take()
            if num_found:
                self._restores.append((saved, seq.state))
        if not seq._admitted_before:
            seq.num_hit, seq._admitted_before = seq.num_cached, True
        self.running.append(seq)
        return True

    def _next(self) -> Seq:
        """The first sequence of the tenant who has the fewest running."""
        if len(self._tenants) == 1:
            return self.waiting[0]
        held = Counter(seq.tenant for seq in self.running)
        return min(self.waiting, key=lambda seq: held[seq.tenant])

    def _make_way(self, seq: Seq) -> bool:
        """Take the place of a tenant who has most of them, for one who has next to none.

        A tenant alone has everything; a small request of another still starts at once, because
        the youngest sequence of the first one goes back to the queue.
        """
        if not self._may_displace(seq):
            return False
        self._preempt()
        return True

    def _may_displace(self, seq: Seq) -> bool:
        if len(self._tenants) == 1:
            return False
        held = Counter(running.tenant for running in self.running)
        # Who has fewer than a sixteenth of the places takes one from a tenant with more than half.
        few = max(self.config.max_running // 16, 1)
        most = max(held.values(), default=0)
        mine = held[seq.tenant]
        # The other keeps more than it gives, or the two would take each other's place for ever.
        return mine < few and most > max(len(self.running) // 2, mine + 1)

    def _grow(self) -> None:
        """Give each sequence the block its next token needs; preempt the youngest if need be."""
        for seq in list(self.running):
            # Preempting may take this very sequence, the last one; without blocks it is done here.
            while seq.blocks and self.pool.blocks_for(len(seq.tokens)) > len(seq.blocks):
                if (more := self.pool.allocate(1)) is not None:
                    seq.blocks += more
                else:
                    self._preempt()

    def _preempt(self) -> None:
        """The youngest of the tenant who has the most goes back to the front of the queue."""
        held = Counter(seq.tenant for seq in self.running)
        most = max(held.values())
        seq = next(seq for seq in reversed(self.running) if held[seq.tenant] == most)
        self.running.remove(seq)
        # The full blocks of its prompt stay in the prefix index until someone needs the room, so
        # mostly it finds them again.
        self._free(seq)
        self.waiting.appendleft(seq)
        self.num_preempted += 1

    def _free(self, seq: Seq) -> None:
        self.pool.release(seq.blocks)
        seq.blocks, seq.num_cached = [], 0
        if self.states is not None and seq.state >= 0:
            self.states.give(seq.state)
            seq.state = -1

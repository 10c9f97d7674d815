"""Run the packed passes of training tasks, and gather their gradients.

A pass holds datums of any number of adapters; between two passes, and between the traced losses of
one, others may use the device. Which gradients an adapter then takes is the trainer's business.

Shapes: T tokens of a pass, D hidden size, L layers with experts, k experts of a token.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tinkex.contract.routing import NOT_RECORDED
from tinkex.engine.lora.adapter import Adapter, AdapterSpan, LoraBatch
from tinkex.engine.model.attention import PackedCausal
from tinkex.engine.model.decoder import DecoderLike
from tinkex.engine.model.mixture import Routing
from tinkex.engine.model.shape import ModelConfig
from tinkex.engine.numerics.row_filling import exactly
from tinkex.engine.optim.resident import ResidentAdapter
from tinkex.engine.train.config import TrainerConfig
from tinkex.engine.train.losses import Prepared
from tinkex.engine.train.packing import Item, Pass, pack, pack_pieces
from tinkex.engine.train.scoring import score
from tinkex.engine.train.tasks import TrainTask, collect, runs_of

Gathered = dict[tuple[str, int], Tensor]
"""Gradients by adapter and virtual shard, until they are settled."""
TURN_S = 0.05
"""How long traced losses of a pass may take before others get a turn."""
_PIECE = 4096
"""Tokens of a virtual shard whose gradients are added up in one product, in deterministic mode. A
constant: another number gives other bits."""


class PassRunner:
    """The passes of one trainer. Not thread-safe, but a pass may run in the middle of another."""

    def __init__(
        self,
        decoder: DecoderLike,
        adapters: Mapping[str, ResidentAdapter],
        after_pass: Callable[[], None],
    ) -> None:
        """`adapters` are the trainer's own, as it goes on to change them."""
        self.decoder, self.group, self.adapters = decoder, decoder.group, adapters
        self.after_pass = after_pass
        self._turn_given_at = 0.0
        self._away_s = 0.0  # that others had in the middle of passes

    def forget(self, tasks: Sequence[TrainTask]) -> None:
        """Forget what passes of the tasks have computed, and free its memory."""
        for task in tasks:
            task.restart()
            resident = self.adapters[task.job.adapter_id]
            for adapter in (resident.adapter, *resident.twins.values()):
                adapter.drop_grad()
        self.decoder.ops.empty_cache()

    def run(self, tasks: Sequence[TrainTask], config: TrainerConfig) -> Gathered:
        """Run all passes of the tasks; gives the gradients, which are no adapter's yet."""
        gathered: Gathered = {}
        owners = list(dict.fromkeys(task.job.adapter_id for task in tasks))
        shards = [task.shards if config.deterministic else () for task in tasks]
        items = [
            Item(
                owners.index(task.job.adapter_id),
                j,
                d,
                len(datum.tokens_T),
                task.needs_backward(datum),
                shards[j][d] if shards[j] else 0,
            )
            for j, task in enumerate(tasks)
            for d, datum in enumerate(task.data)
        ]
        for batch in self._batches(items, config):
            used: dict[tuple[str, int], Adapter] = {}
            for one in batch:
                began_at, began = time.time(), time.perf_counter()
                self._turn_given_at = began
                away_s = self._away_s
                with exactly(config.deterministic and self.decoder.ops.fills_rows):
                    self.run_pass(one, tasks, owners, config)
                took_s = time.perf_counter() - began - (self._away_s - away_s)
                # A pass is shared: each job pays for its tokens.
                seconds_per_token = took_s / one.num_tokens
                num_tokens: Counter[int] = Counter()
                for item in one.items:
                    num_tokens[item.job] += item.length
                    owner = owners[item.owner]
                    used[owner, item.shard] = self._gatherer(owner, item.shard)
                ended_at = time.time()
                for job, count in num_tokens.items():
                    tasks[job].seconds += seconds_per_token * count
                    tasks[job].note_pass(began_at, ended_at, count)
                self._let_others()
            for (owner, shard), adapter in used.items():
                if adapter.grad is not None:
                    gathered[owner, shard] = adapter.grad
                    adapter.drop_grad()
        return gathered

    def give_turn(self) -> None:
        """Let others use the device in the middle of a pass whose traced losses take long.

        The pass stays as it was packed, so its bits do. What others do is theirs: the adapters of
        the pass are in use, and products of theirs are filled up or not as they ask for. A turn may
        come in the middle of a backward, where autograd keeps no graphs. In a group nothing comes
        between: the ranks would not do it at one point.
        """
        if self.group.size > 1:
            return
        began = time.perf_counter()
        if began - self._turn_given_at < TURN_S:
            return
        with exactly(False), torch.enable_grad():
            self._let_others()
        self._turn_given_at = time.perf_counter()
        self._away_s += self._turn_given_at - began

    def _let_others(self) -> None:
        """Let others use the device between two passes; their failures are not the pass's."""
        with self.group.recoverable(False):
            self.after_pass()

    def _batches(self, items: Sequence[Item], config: TrainerConfig) -> Iterator[list[Pass]]:
        """The passes, in batches between which no gradient has to wait for another.

        Shards whose bits are their own in any company go side by side; else one after the other.
        """
        if not config.deterministic:
            yield pack(items, max_tokens=config.max_tokens)
        elif self.decoder.batch_invariant:
            together = config.max_tokens if self.decoder.keeps_pieces_apart else 0
            yield pack_pieces(items, piece_tokens=_PIECE, max_tokens=together)
        else:
            for shard in sorted({item.shard for item in items}):
                mine = [item for item in items if item.shard == shard]
                yield pack(mine, max_tokens=config.max_tokens, alone=True)

    def _gatherer(self, owner: str, shard: int) -> Adapter:
        """The adapter, or its twin, that a shard's gradients go to in this pass."""
        resident = self.adapters[owner]
        return resident.twin(shard) if self.decoder.batch_invariant else resident.adapter

    def run_pass(
        self, one: Pass, tasks: Sequence[TrainTask], owners: Sequence[str], config: TrainerConfig
    ) -> None:
        """Forward, losses and backward of one packed pass; gradients go to its adapters."""
        decoder, device = self.decoder, self.decoder.device
        exact = config.deterministic and decoder.ops.fills_rows
        data = [tasks[item.job].data[item.datum] for item in one.items]
        tokens_T = torch.cat([datum.tokens_T for datum in data]).to(device)
        positions_T = torch.cat([torch.arange(item.length) for item in one.items]).to(device)
        spans = [
            AdapterSpan(start, stop, self._gatherer(owners[owner], shard))
            for start, stop, owner, shard in one.spans()
        ]
        lora = LoraBatch(spans, apart=config.deterministic and decoder.keeps_pieces_apart)
        runs = list(runs_of(one, tasks, device))
        routing = _routing(decoder.config, data, device)
        with torch.set_grad_enabled(one.backward):
            hidden_TD = decoder.forward(
                tokens_T,
                positions_T,
                PackedCausal(one.bounds, decoder.config.windows, exact=exact),
                lora,
                room=config.activation_bytes,
                routing=routing,
            )
        if routing is not None and routing.chosen and decoder.config.experts is not None:
            for item, (start, stop) in zip(one.items, pairwise(one.bounds), strict=True):
                load = tasks[item.job].router_load
                load.add(routing, slice(start, stop), decoder.config.experts.count)
        if one.backward:
            # After the forward: on a GPU the host does this while the device computes.
            for span in lora.spans:
                span.adapter.start_grad(decoder.leaf_keys)
        dhidden_TD = score(
            decoder,
            hidden_TD,
            [run for run, _ in runs],
            lora,
            backward=one.backward,
            chunk_rows=config.head_rows,
            after_traced=self.give_turn,
        )
        if dhidden_TD is not None and hidden_TD.requires_grad:
            _Handed.apply(hidden_TD, dhidden_TD).backward()  # type: ignore[no-untyped-call]
        for run, items in runs:
            collect(run, items, tasks)
        self.group.finish()


class _Handed(torch.autograd.Function):
    """A number whose gradient with respect to `hidden` is `dhidden`.

    `hidden.backward(dhidden)` would do, but makes torch import sympy: seconds of a first step.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, dhidden_TD: Tensor) -> Tensor:
        ctx.save_for_backward(dhidden_TD)
        return hidden_TD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def _routing(config: ModelConfig, data: Sequence[Prepared], device: torch.device) -> Routing | None:
    """The record of a mixture's routers in a pass, with the experts that its datums prescribe."""
    if (experts := config.routing) is None:
        return None
    if all(datum.experts_TLk is None for datum in data):
        return Routing()
    free = torch.tensor(NOT_RECORDED, dtype=torch.int16)
    shape = experts.layers, experts.per_token
    rows = [
        free.expand(len(datum.tokens_T), *shape) if datum.experts_TLk is None else datum.experts_TLk
        for datum in data
    ]
    given_LTk = torch.cat(rows).transpose(0, 1).contiguous().to(device)
    return Routing(dict(zip(config.expert_layers, given_LTk, strict=True)))

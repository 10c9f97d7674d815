"""LoRA adapters, and which rows of a packed batch belong to which of them.

An `Adapter` holds the fp32 low-rank matrices of one tenant, grouped the way the decoder fuses its
linears: the A matrices of q, k and v lie in one tensor, so one product serves all three. A
`LoraBatch` maps contiguous spans of a packed token stream to adapters; the base matmul runs once
over all rows and each adapter touches its own span only, so tenants never mix. What an adapter was
trained with, or where it is stored, is not known here.

Shapes: T rows, I inputs of a linear, O its outputs, R ranks of all parts of a group, r of one part.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkex.contract.models import MAX_RANK
from tinkex.engine.numerics.ops import Ops
from tinkex.engine.numerics.row_filling import filled
from tinkex.errors import InvalidInputError

Kind = Literal["attn", "mlp", "unembed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A module that can carry an adapter, and its columns in the fused linear's output."""

    module: str
    """Its Hugging Face name, such as `model.layers.0.self_attn.q_proj`."""
    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Target:
    """A fused linear of a decoder."""

    in_size: int
    parts: tuple[TargetPart, ...]

    @staticmethod
    def of(in_size: int, kind: Kind, prefix: str, **out_sizes: int) -> Target:
        """The linears of one `prefix` that read the same input, one behind the other."""
        parts, start = [], 0
        for name, size in out_sizes.items():
            parts.append(TargetPart(f"{prefix}.{name}", kind, start, start + size))
            start += size
        return Target(in_size, tuple(parts))


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Rank and scale of one module inside a group. `row` is where its A starts."""

    target: TargetPart
    row: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class LoraGroup:
    """The weights of one adapter on one fused linear: a stacked A, and a B per part."""

    a_RI: Tensor
    b_Or: tuple[Tensor, ...]
    parts: tuple[LoraPart, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a_RI, *self.b_Or)


class Adapter:
    """The LoRA weights of one tenant, by decoder target, always fp32.

    All weights lie in one buffer, `flat`, so that a step, a copy or a norm is one operation and not
    one per module; the groups' tensors are views of it, and the leaves of autograd. Moments and
    gradients have the same layout; `views` takes such a buffer apart.
    """

    content: str = ""
    """The digest of the checkpoint that a frozen adapter was read from; empty for others."""

    def __init__(self, groups: Mapping[str, LoraGroup], *, trainable: bool = True) -> None:
        given = [tensor for group in groups.values() for tensor in group.tensors()]
        self.layout, size = lay_out([(t.shape[0], t.shape[1]) for t in given])
        """Where each parameter starts, and its shape."""
        device = given[0].device if given else torch.device("cpu")
        self.flat = torch.zeros(size, device=device)
        self.grad: Tensor | None = None
        """Gradients of the passes that run now; None between jobs."""
        self.signature = tuple((key, group.parts) for key, group in groups.items())
        """Equal for adapters whose buffers have equal layouts and scales."""
        for view, tensor in zip(self.views(self.flat), given, strict=True):
            view.copy_(tensor.detach())
        self.groups = self._groups(trainable=trainable)

    def _groups(self, *, trainable: bool) -> dict[str, LoraGroup]:
        """The buffer by linear."""
        views = self.views(self.flat)
        leaves = iter([view.detach().requires_grad_() for view in views] if trainable else views)
        groups = {}
        for key, parts in self.signature:
            a_RI, *b_Or = (next(leaves) for _ in range(1 + len(parts)))
            groups[key] = LoraGroup(a_RI, tuple(b_Or), parts)
        return groups

    @property
    def num_whole(self) -> int:
        """Numbers of all of it, wherever they lie."""
        return self.flat.numel()

    def views(self, flat: Tensor) -> list[Tensor]:
        """A buffer of this adapter's layout, parameter by parameter."""
        return take_apart(flat, self.layout)

    def fold(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `views`: tensors parallel to the parameters, in one new buffer."""
        flat = torch.zeros_like(self.flat)
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def start_grad(self, keys: Container[str] | None = None) -> None:
        """Gather gradients from here on: the `.grad` of leaves is a view of `grad`.

        `keys` names the linears whose gradients come by way of leaves, where not all do: some
        hundred views take the host a millisecond.
        """
        if self.grad is not None:
            return
        self.grad, places = torch.zeros_like(self.flat), iter(self.layout)
        for key, group in self.groups.items():
            for leaf, (at, shape) in zip(group.tensors(), places, strict=False):
                if keys is None or key in keys:
                    leaf.grad = self.grad.as_strided(shape, (shape[1], 1), at)

    def drop_grad(self) -> None:
        if self.grad is not None:
            self.grad = None
            for leaf in self.parameters():
                leaf.grad = None

    def parameters(self) -> Iterator[Tensor]:
        for group in self.groups.values():
            yield from group.tensors()

    def modules(self) -> Iterator[tuple[LoraPart, Tensor, Tensor]]:
        """Every adapted module: its part, A [r, I] (a view) and B [O, r]."""
        for group in self.groups.values():
            for part, b_Or in zip(group.parts, group.b_Or, strict=True):
                yield part, group.a_RI[part.row : part.row + part.rank], b_Or

    def norm(self, grad: Tensor, ops: Ops) -> float:
        """The 2-norm of a buffer's values together, as one number on the host."""
        return ops.norm(grad)

    def share(self, grad: Tensor) -> Tensor:
        """A gradient with what others computed of it; here all of it was computed."""
        return grad

    def change_matrices(self, flat: Tensor, change: Callable[[Tensor, Tensor], None]) -> None:
        """Call `change(weights, values)` for every module's own A and B.

        `flat` has the values. The stacked A of a fused linear is taken apart: each module is a
        matrix of its own.
        """
        weights, values, at = self.views(self.flat), self.views(flat), 0
        for group in self.groups.values():
            rows = [(part.row, part.row + part.rank) for part in group.parts]
            for pieces in [rows, *([(0, len(b_Or))] for b_Or in group.b_Or)]:
                for start, stop in pieces:
                    change(weights[at][start:stop], values[at][start:stop])
                at += 1

    def twin(self) -> Adapter:
        """The same weights, not a copy, with gradients of its own."""
        return self._over(self.flat, trainable=True)

    def frozen_copy(self) -> Adapter:
        """An immutable snapshot, for sampling while training goes on."""
        # One copy, not one for each of some hundred tensors.
        return self._over(self.flat.detach().clone(), trainable=False)

    def _over(self, flat: Tensor, *, trainable: bool) -> Adapter:
        """An adapter of this layout whose weights are those in `flat`."""
        other = object.__new__(Adapter)
        other.layout, other.signature = self.layout, self.signature
        other.flat, other.grad = flat, None
        other.groups = other._groups(trainable=trainable)
        return other


_ALIGNED = 8
"""Parameters start at multiples of this, as 16-byte loads of their bf16 copies need."""
Layout = tuple[tuple[int, tuple[int, int]], ...]


def lay_out(shapes: Iterable[tuple[int, int]]) -> tuple[Layout, int]:
    """Where parameters of these shapes start in one buffer, and the buffer's size."""
    layout, at = [], 0
    for shape in shapes:
        layout.append((at, shape))
        at += -(-shape[0] * shape[1] // _ALIGNED) * _ALIGNED
    return tuple(layout), at


def take_apart(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Views of a buffer, parameter by parameter."""
    start = flat.storage_offset()
    return [flat.as_strided(shape, (shape[1], 1), start + at) for at, shape in layout]


@dataclass(frozen=True, slots=True)
class ModuleInit:
    """The first weights of one module; `rank` and `scale` may differ per module."""

    rank: int
    scale: float
    a_rI: Tensor
    b_Or: Tensor


def build_adapter(
    targets: Mapping[str, Target], modules: Mapping[str, ModuleInit], device: torch.device | str
) -> Adapter:
    """Stack per-module matrices into the groups of a decoder. Every module must be a target."""
    check_modules(modules, modules_of(targets))
    groups: dict[str, LoraGroup] = {}
    for key, target in targets.items():
        chosen = [(part, modules[part.module]) for part in target.parts if part.module in modules]
        if not chosen:
            continue
        for part, init in chosen:
            _check_shapes(part, target.in_size, init)
        parts, row = [], 0
        for part, init in chosen:
            parts.append(LoraPart(part, row, init.rank, init.scale))
            row += init.rank
        a_RI = torch.cat([init.a_rI for _, init in chosen])
        b_Or = [init.b_Or.to(device, torch.float32) for _, init in chosen]
        groups[key] = LoraGroup(a_RI.to(device, torch.float32), tuple(b_Or), tuple(parts))
    return Adapter(groups)


def modules_of(targets: Mapping[str, Target]) -> set[str]:
    """The modules of a base model that can carry an adapter."""
    return {part.module for target in targets.values() for part in target.parts}


def check_modules(modules: Iterable[str], known: Set[str]) -> None:
    """Refuse modules that a base model has not.

    Raises:
        InvalidInputError: Names the first of them.
    """
    if unknown := sorted(set(modules) - known):
        raise InvalidInputError(
            f"the model has no adaptable module {unknown[0][:120]!r}"
            f"{f' (and {len(unknown) - 1} more)' if len(unknown) > 1 else ''}; "
            f"it has, for example, {min(known)!r}"
        )


def _check_shapes(part: TargetPart, in_size: int, init: ModuleInit) -> None:
    want_a, want_b = (init.rank, in_size), (part.stop - part.start, init.rank)
    if tuple(init.a_rI.shape) != want_a or tuple(init.b_Or.shape) != want_b:
        raise InvalidInputError(
            f"LoRA weights of {part.module!r} have shapes {tuple(init.a_rI.shape)} and "
            f"{tuple(init.b_Or.shape)}; this base model needs {want_a} and {want_b}"
        )


def fresh_adapter(
    targets: Mapping[str, Target],
    *,
    rank: int,
    alpha: float,
    kinds: Iterable[Kind],
    seed: int | None,
    device: torch.device | str,
) -> Adapter:
    """A new adapter that changes nothing yet: A is uniform as `torch.nn.Linear` has it, B is zero.

    Each module draws from its own generator, so equal seeds give equal matrices whichever other
    modules are trained.
    """
    if not 1 <= rank <= MAX_RANK:
        raise InvalidInputError(f"rank must be 1 to {MAX_RANK}, got {rank}", path="lora.rank")
    if not (math.isfinite(alpha) and alpha > 0):
        raise InvalidInputError(f"alpha must be positive, got {alpha}", path="lora.alpha")
    wanted = frozenset(kinds)
    if not wanted:
        raise InvalidInputError(
            "train_attn, train_mlp and train_unembed are all false; nothing would be trained",
            path="lora",
        )
    root = secrets.randbits(63) if seed is None else seed
    modules: dict[str, ModuleInit] = {}
    for target in targets.values():
        bound = 1 / math.sqrt(target.in_size)
        for part in target.parts:
            if part.kind in wanted:
                # The CPU's generator, whatever the device: a seed means the same matrices on all.
                generator = torch.Generator().manual_seed(_module_seed(root, part.module))
                a_rI = torch.empty(rank, target.in_size).uniform_(
                    -bound, bound, generator=generator
                )
                b_Or = torch.zeros(part.stop - part.start, rank)
                modules[part.module] = ModuleInit(rank, alpha / rank, a_rI, b_Or)
    return build_adapter(targets, modules, device)


def _module_seed(root: int, module: str) -> int:
    digest = hashlib.sha256(f"{root}:{module}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


# ------------------------------------------------------------------------------- packed batches


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Rows `start:stop` of a packed stream belong to `adapter`."""

    start: int
    stop: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class LoraTerm:
    """Rows `start:stop` and the matrices that one linear applies to them."""

    start: int
    stop: int
    group: LoraGroup


class LoraBatch:
    """Contiguous, non-overlapping spans; rows outside all spans see the base model only.

    With `apart`, each span is a piece of the batch whose gradients are to be a function of its own
    rows alone, to the bit; decoders that `keeps_pieces_apart` honour it.
    """

    def __init__(self, spans: Iterable[AdapterSpan], *, apart: bool = False) -> None:
        self.apart = apart
        self.spans = tuple(span for span in spans if span.stop > span.start)
        for left, right in zip(self.spans, self.spans[1:], strict=False):
            assert left.stop <= right.start, "LoRA spans must be sorted and disjoint"

    def terms(self, key: str) -> tuple[LoraTerm, ...]:
        """The terms that the linear `key` must add, span by span."""
        return tuple(
            LoraTerm(span.start, span.stop, group)
            for span in self.spans
            if (group := span.adapter.groups.get(key)) is not None
        )

    def select(self, rows: Sequence[int] | NDArray[np.int64]) -> LoraBatch:
        """The same adapters over a sorted subset of rows, which are counted from zero again."""
        rows = np.asarray(rows)
        edges = [(span.start, span.stop) for span in self.spans]
        cuts = np.searchsorted(rows, np.asarray(edges, dtype=np.int64).reshape(-1, 2))
        spans = (
            AdapterSpan(int(start), int(stop), span.adapter)
            for span, (start, stop) in zip(self.spans, cuts, strict=True)
        )
        return LoraBatch(spans, apart=self.apart)


NO_TERMS: tuple[LoraTerm, ...] = ()


def low_rank_inner(x_TI: Tensor, terms: Sequence[LoraTerm]) -> list[Tensor]:
    """The scaled Ax of each term's rows."""
    scaled: list[Tensor] = []
    for term in terms:
        x_tI = x_TI[term.start : term.stop]
        # LoRA (arXiv 2106.09685): y += B (scale * A x). The scale goes to the narrow side.
        h_tR = (filled(x_tI) @ term.group.a_RI.to(x_TI.dtype).t())[: len(x_tI)]
        _scale_parts(h_tR, term.group)
        scaled.append(h_tR)
    return scaled


def add_low_rank(y_TO: Tensor, x_TI: Tensor, terms: Sequence[LoraTerm]) -> list[Tensor]:
    """Add each term's B(Ax) to its rows of `y_TO` in place; returns the scaled Ax per term."""
    scaled = low_rank_inner(x_TI, terms)
    for term, h_tR in zip(terms, scaled, strict=True):
        for part, b_Or in zip(term.group.parts, term.group.b_Or, strict=True):
            columns = y_TO[term.start : term.stop, part.target.start : part.target.stop]
            more = filled(h_tR[:, part.row : part.row + part.rank])
            sums = filled(columns)  # the columns themselves, unless they are few
            # Added where it stands: a product of its own would be another tensor of that width.
            sums.addmm_(more, b_Or.to(y_TO.dtype).t())
            if sums is not columns:
                columns.copy_(sums[: len(columns)])
    return scaled


def low_rank_backward(
    dy_TO: Tensor,
    x_TI: Tensor,
    dx_TI: Tensor | None,
    terms: Sequence[LoraTerm],
    scaled: Sequence[Tensor],
) -> list[Tensor]:
    """Gradients of every term's A and Bs, in order; adds the terms' share to `dx_TI` in place."""
    grads: list[Tensor] = []
    for term, h_tR in zip(terms, scaled, strict=True):
        group = term.group
        dh_tR = torch.empty_like(h_tR)
        db_Or: list[Tensor] = []
        for part, b_Or in zip(group.parts, group.b_Or, strict=True):
            dy_tO = dy_TO[term.start : term.stop, part.target.start : part.target.stop]
            rows = slice(part.row, part.row + part.rank)
            # [t, r] = [t, O] @ [O, r]; then dA = dh^T x and dB = dy^T h.
            dh_tR[:, rows] = dy_tO @ b_Or.to(dy_tO.dtype)
            db_Or.append((dy_tO.t() @ h_tR[:, rows]).float())
        _scale_parts(dh_tR, group)
        grads.append((dh_tR.t() @ x_TI[term.start : term.stop]).float())
        grads.extend(db_Or)
        if dx_TI is not None:
            dx_TI[term.start : term.stop].addmm_(dh_tR, group.a_RI.to(dx_TI.dtype))
    return grads


def accumulate(terms: Sequence[LoraTerm], grads: Sequence[Tensor]) -> None:
    """Add gradients to the `.grad` of the terms' tensors, as autograd does for its leaves."""
    tensors = [tensor for term in terms for tensor in term.group.tensors()]
    for tensor, grad in zip(tensors, grads, strict=True):
        if tensor.grad is None:
            tensor.grad = grad
        else:
            tensor.grad += grad


def _scale_parts(h_tR: Tensor, group: LoraGroup) -> None:
    scales = {part.scale for part in group.parts}
    if len(scales) == 1:
        h_tR.mul_(scales.pop())
        return
    for part in group.parts:
        h_tR[:, part.row : part.row + part.rank].mul_(part.scale)

"""The losses: what each computes, which inputs it reads, which settings it takes.

A loss is a plain sum over target tokens; the client normalises. r = exp(logp - q), where q is the
datum's `logprobs`, reported by the sampler. The formulas themselves are `engine.train.formulas`.
Inputs or settings that a loss would have to ignore are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tinkex.contract.bounds import Between
from tinkex.contract.settings import Setting, read_all, shown
from tinkex.errors import InvalidInputError, NotSupportedError


class LossFnType(StrEnum):
    """The named losses. A plain string of the same text works wherever one of these does.

    `kl_divergence`, `reverse_kl`, `dppo` and `sapo` are computed by a Tinkex server; the hosted
    service refuses them.
    """

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"
    GSPO = "gspo"
    DPPO = "dppo"
    SAPO = "sapo"
    STABLE_REINFORCE = "stable_reinforce"
    KL_DIVERGENCE = "kl_divergence"
    REVERSE_KL = "reverse_kl"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of a datum, of the shape of `target_tokens`."""

    name: str
    dtype: Literal["int64", "float32"]
    says: str


TARGETS = Input("target_tokens", "int64", "the token that each position should predict")
WEIGHTS = Input("weights", "float32", "how much each target counts; 0 switches it off")
LOGPROBS = Input("logprobs", "float32", "q: what the sampler reported for each target")
ADVANTAGES = Input("advantages", "float32", "A: how good each target turned out to be")
CLIP_LOW = Input("clip_low_threshold", "float32", "a lower clip limit for each token")
CLIP_HIGH = Input("clip_high_threshold", "float32", "an upper clip limit for each token")
RATIO_MASK = Input(
    "sequence_ratio_mask", "float32", "1 where a token takes part in the sequence's ratio"
)


TEACHER_LOGPROBS = Input(
    "teacher_logprobs", "float32", "t: what a teacher that is named in the loss says of each target"
)

TeacherUse = Literal["reported", "in place of q", "added to A"]
"""What a loss does with the logprobs of its teacher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The declaration of a loss, on which several parts must agree."""

    name: str
    says: str
    """The value of one target, as a formula."""
    needs: tuple[Input, ...]
    """Inputs that must be there, besides `target_tokens`."""
    takes: tuple[Input, ...] = (WEIGHTS,)
    """Inputs that may be there."""
    settings: tuple[Setting, ...] = ()
    """The keys of `loss_fn_config`."""
    soft_targets: bool = False
    """True: `target_tokens` may be 2-D, several candidates per position."""
    token_local: bool = True
    """False: a token's value depends on the whole datum."""
    gates: tuple[Input, ...] = (WEIGHTS,)
    """Inputs whose zero switches a target off: no loss, no gradient."""
    teacher: TeacherUse = "added to A"
    source: str = ""
    """Where the loss comes from, when it is not textbook knowledge."""

    def taught(self) -> Loss:
        """The declaration for data of which a teacher fills an input."""
        filled = {"in place of q": LOGPROBS, "added to A": ADVANTAGES}.get(self.teacher)
        needs = tuple(each for each in self.needs if each is not filled)
        # The advantage of a teacher is added to the rewards' own, where there are any.
        own = (ADVANTAGES,) if filled is ADVANTAGES else ()
        return replace(self, needs=needs, takes=(*own, *self.takes))

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Every input it may have."""
        return (TARGETS, *self.needs, *self.takes)

    @property
    def weighs_itself(self) -> bool:
        """True: the formula itself uses `weights`; else they multiply its values."""
        return WEIGHTS in self.needs


MOST = 1e30
"""Losses are computed in float32; more than this would overflow on the way."""


def _clip(low: float, high: float) -> tuple[Setting, ...]:
    return (
        Setting("clip_low_threshold", low, Between(0.0, MOST)),
        Setting("clip_high_threshold", high, Between("clip_low_threshold", MOST)),
    )


_RL = (LOGPROBS, ADVANTAGES)

_DECLARED = (
    Loss(
        name="cross_entropy",
        says="`-w * logp`",
        needs=(WEIGHTS,),
        takes=(LOGPROBS,),
        soft_targets=True,
        teacher="reported",
    ),
    Loss(
        name="importance_sampling",
        says="`-r * A`",
        needs=_RL,
        gates=(ADVANTAGES, WEIGHTS),
    ),
    Loss(
        name="ppo",
        says="`-min(r * A, clip(r, low, high) * A)`",
        needs=_RL,
        takes=(WEIGHTS, CLIP_LOW, CLIP_HIGH),
        settings=_clip(0.8, 1.2),
        gates=(ADVANTAGES, WEIGHTS),
    ),
    Loss(
        name="cispo",
        says="`-stop_grad(clip(r, low, high)) * A * logp`",
        needs=_RL,
        takes=(WEIGHTS, CLIP_LOW, CLIP_HIGH),
        settings=_clip(0.0, 4.0),
        gates=(ADVANTAGES, WEIGHTS),
    ),
    Loss(
        name="dro",
        says="`-(logp * A - beta / 2 * (logp - q)^2)`",
        needs=_RL,
        settings=(Setting("beta", 0.05, Between(0.0, MOST)),),
    ),
    Loss(
        name="gspo",
        says="`ppo` with one ratio per sequence, the geometric mean of `r`",
        needs=_RL,
        takes=(WEIGHTS, RATIO_MASK, CLIP_LOW, CLIP_HIGH),
        settings=_clip(0.8, 1.2),
        token_local=False,
    ),
    Loss(
        name="dppo",
        says="`-r * A`, masked where the probability has moved over the threshold and would move "
        "further",
        needs=_RL,
        settings=(Setting("divergence_threshold", 0.2, Between(0.0, MOST)),),
        gates=(ADVANTAGES, WEIGHTS),
    ),
    Loss(
        name="sapo",
        says="`-4 / tau * sigmoid(tau * (r - 1)) * A`; tau is `tau_pos` where `A > 0`, else "
        "`tau_neg`",
        needs=_RL,
        settings=(
            Setting("tau_pos", 1.0, Between(1e-3, 1e3)),
            Setting("tau_neg", 1.05, Between(1e-3, 1e3)),
        ),
        gates=(ADVANTAGES, WEIGHTS),
        source="https://arxiv.org/abs/2511.20347",
    ),
    Loss(
        name="kl_divergence",
        says="`exp(q - logp) - (q - logp) - 1`; with 2-D targets `exp(q) * (q - logp)`",
        needs=(LOGPROBS,),
        soft_targets=True,
        teacher="in place of q",
    ),
    Loss(
        name="reverse_kl",
        says="`(logp - q)^2 / 2`, whose gradient over samples of the policy is that of the KL to q",
        needs=(LOGPROBS,),
        teacher="in place of q",
        source="http://joschu.net/blog/kl-approx.html",
    ),
)
LOSSES: Mapping[str, Loss] = {loss.name: loss for loss in _DECLARED}
CUSTOM = "custom"
"""The loss of a user's own, traced; its inputs are declared by its graph."""
MAX_CUSTOM_INPUTS = 16
CUSTOM_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
CUSTOM_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
"""How many inputs such a loss may have, and what it may call them and its metrics."""
UNDEFINED: Mapping[str, str] = {
    "stable_reinforce": "stable_reinforce has no public definition: the hosted service's pages say "
    "how to call it, not what it computes. It is not offered here; use importance_sampling, ppo, "
    "cispo or a custom loss."
}
"""Names of the hosted service that nobody outside it can compute, and what to say."""


# ---------------------------------------------------------------------------------------- checks


def find_loss(name: str) -> Loss:
    """The declaration of a named loss.

    Raises:
        NotSupportedError: There is none of that name.
    """
    if (loss := LOSSES.get(name)) is None:
        raise NotSupportedError(
            UNDEFINED.get(name)
            or f"no loss {shown(name)}; known: {', '.join(sorted(LOSSES))}, {CUSTOM}.",
            path="loss_fn",
        )
    return loss


def read_settings(loss: Loss, given: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a loss with defaults filled in; unknown or unusable ones are refused."""
    return read_all(loss.settings, given, of=f"loss {loss.name!r}", path="loss_fn_config")


class Form(NamedTuple):
    """The facts that the checks need of a tensor."""

    is_whole: bool
    shape: tuple[int, ...]


def check_inputs(
    loss: Loss | None, inputs: Mapping[str, Form], *, num_tokens: int, path: str
) -> None:
    """Names, types and shapes of one datum's inputs. None: a custom loss, only the targets.

    Raises:
        InvalidInputError: Names the field and what is allowed.
    """
    check_names(loss, inputs, path)
    _check_targets(inputs["target_tokens"], loss, num_tokens, f"{path}.target_tokens")
    if loss is None:
        return
    shape = inputs["target_tokens"].shape
    for name, form in inputs.items():
        if form.shape != shape:
            raise InvalidInputError(
                f"has shape {list(form.shape)}, target_tokens has {list(shape)}",
                path=f"{path}.{name}",
            )


def check_names(loss: Loss | None, given: Mapping[str, Any], path: str) -> None:
    """Every needed input is there, and none that the loss would have to ignore."""
    needed = (TARGETS,) if loss is None else (TARGETS, *loss.needs)
    if missing := [each.name for each in needed if each.name not in given]:
        what = "a custom loss" if loss is None else f"loss {loss.name!r}"
        raise InvalidInputError(
            f"{what} needs {', '.join(missing)}; given: {', '.join(sorted(given)) or 'nothing'}",
            path=path,
        )
    if loss is None:
        return
    known = [each.name for each in loss.inputs]
    if unknown := sorted(name for name in given if name not in known):
        raise InvalidInputError(
            f"loss {loss.name!r} has no use for {', '.join(unknown)}; it reads "
            f"{', '.join(known)}. Leave it out.",
            path=path,
        )


def _check_targets(form: Form, loss: Loss | None, num_tokens: int, path: str) -> None:
    if not form.is_whole:
        raise InvalidInputError("must be int64", path=path)
    ranks = (1, 2) if loss is None or loss.soft_targets else (1,)
    if len(form.shape) not in ranks:
        allowed = " or ".join(f"{rank}-D" for rank in ranks)
        raise InvalidInputError(f"must be {allowed}, got shape {list(form.shape)}", path=path)
    if form.shape[0] != num_tokens:
        raise InvalidInputError(
            f"has {form.shape[0]} rows for {num_tokens} model input tokens; each token has the one "
            "after it as its target: input tokens[:-1], targets tokens[1:]",
            path=path,
        )

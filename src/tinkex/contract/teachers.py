"""A teacher: a model whose logprobs at the targets a loss reads, computed on the server.

It is named in `loss_fn_config`, so that it travels wherever a loss does: `teacher` is a base model
or the path of a checkpoint, `teacher_coef` how much it counts. With t the teacher's logprob of a
target and q the sampler's, a loss with advantages adds `coef * ((t - q) - mean)` to them, the mean
taken over the targets of the request whose weight is not 0; `kl_divergence` reads t in place of q;
a custom loss reads t as its input `teacher_logprobs`; `cross_entropy` only has it reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.contract.bounds import Between
from tinkex.contract.losses import LOSSES, MOST
from tinkex.contract.settings import Setting, read_all, shown
from tinkex.errors import InvalidInputError

NAME, COEF = "teacher", "teacher_coef"
"""The keys of `loss_fn_config`."""
PATH = f"loss_fn_config.{NAME}"
SETTINGS = (Setting(COEF, 1.0, Between(0.0, MOST), "How much the teacher's advantage counts."),)


@dataclass(frozen=True, slots=True)
class TeacherName:
    name: str
    """A base model, or `tinker://RUN/KIND/NAME`."""
    coef: float = 1.0

    @property
    def is_checkpoint(self) -> bool:
        return self.name.startswith("tinker://")


def split_config(
    loss_fn: str, config: Mapping[str, Any]
) -> tuple[TeacherName | None, dict[str, Any]]:
    """The teacher that the settings of a loss name, and the settings of the loss itself.

    Raises:
        InvalidInputError: The name is none, or the coefficient cannot be used.
    """
    rest = {key: value for key, value in config.items() if key not in (NAME, COEF)}
    own = {key: value for key, value in config.items() if key == COEF}
    if NAME not in config:
        if own:
            raise InvalidInputError(f"needs a {NAME}", path=f"loss_fn_config.{COEF}")
        return None, rest
    name = config[NAME]
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"must be a base model or a tinker:// path, got {shown(name)}", path=PATH
        )
    loss = LOSSES.get(loss_fn)
    if own and (loss is None or loss.teacher != "added to A"):
        raise InvalidInputError(
            f"loss {loss_fn!r} adds no advantages and has no use for it; leave it out",
            path=f"loss_fn_config.{COEF}",
        )
    coef = read_all(SETTINGS, own, of="a teacher", path="loss_fn_config")[COEF]
    return TeacherName(name, float(coef)), rest

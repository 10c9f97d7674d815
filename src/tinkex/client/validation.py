"""Say what is wrong with a call before any of it travels (R29).

Each check names the argument, shows the value and says what would be right. The server checks
everything again; these are here because an error at the line that made it costs a second, and one
from a queue costs minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinkex import types
from tinkex.contract.losses import CUSTOM, LOSSES, TARGETS, WEIGHTS, LossFnType, read_settings
from tinkex.contract.optimizers import OPTIMIZERS, read_params
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.settings import is_finite, shown
from tinkex.contract.teachers import NAME as TEACHER
from tinkex.contract.teachers import split_config
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.types.account.checkpoints import TYPE_BY_KIND, TinkerPath
from tinkex.types.fields.bounds import MAX_TTL_S, MIN_TTL_S


def check_loss(loss_fn: Any, config: Mapping[str, Any] | None) -> str:
    """The loss as plain text. Settings unknown here are left to the server, which may know more."""
    name = str(loss_fn) if isinstance(loss_fn, str) else None
    if name not in _LOSS_NAMES:
        raise InvalidInputError(
            f"unknown loss {loss_fn!r}; known: {', '.join(_LOSS_NAMES)}. For a loss of your own "
            "use forward_backward_custom.",
            path="loss_fn",
        )
    if config is not None and not isinstance(config, Mapping):
        raise InvalidInputError(
            f"expected a dict of settings, got {config!r}", path="loss_fn_config"
        )
    for key, value in (config or {}).items():
        _check_sendable(key, value)
    if name == CUSTOM and "loss_id" not in (config or {}):
        raise InvalidInputError(
            "loss 'custom' needs a loss_id; use forward_backward_custom(data, handle)",
            path="loss_fn_config.loss_id",
        )
    if (loss := LOSSES.get(name)) is not None and config:
        known = {setting.name for setting in loss.settings}
        read_settings(loss, {key: value for key, value in config.items() if key in known})
    return name


_LOSS_NAMES = tuple(LossFnType)


def _check_sendable(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidInputError(
            f"expected a number or text, got {value!r}", path=f"loss_fn_config.{key}"
        )
    if not isinstance(value, str) and not is_finite(value):
        raise InvalidInputError(
            f"expected a finite number, got {shown(value)}", path=f"loss_fn_config.{key}"
        )


def with_teacher(
    config: Mapping[str, float | str] | None, teacher: str | None
) -> Mapping[str, float | str] | None:
    """The settings of a loss, with the teacher that a call names."""
    if teacher is None:
        return config
    if TEACHER in (config or {}):
        raise InvalidInputError("is in loss_fn_config, too; give one of them", path=TEACHER)
    return {**(config or {}), TEACHER: teacher}


def check_teacher(loss_fn: str, config: Mapping[str, Any] | None, honoured: bool) -> bool:
    """Whether the settings of a loss name a teacher; refuse one that the server would not ask.

    Raises:
        NotSupportedError: The server has no teachers.
    """
    teacher, _ = split_config(loss_fn, config or {})
    if teacher is not None and not honoured:
        raise NotSupportedError(
            f"this server computes no logprobs of a teacher; ask {teacher.name!r} for them with "
            "compute_logprobs of a sampling client, and give them with the data",
            path=TEACHER,
        )
    return teacher is not None


def check_data(
    data: Sequence[types.Datum], loss_fn: str, *, is_taught: bool = False
) -> list[types.Datum]:
    """The datums as a list; each has what the loss needs, as long as its targets.

    `is_taught`: a teacher fills in one input.
    """
    if isinstance(data, types.Datum | str | Mapping) or not isinstance(data, Iterable):
        raise InvalidInputError(f"expected a list of Datum, got {type(data).__name__}", path="data")
    datums = list(data)
    if not datums:
        raise InvalidInputError("a batch needs at least one datum, got none", path="data")
    for index, datum in enumerate(datums):
        if not isinstance(datum, types.Datum):
            raise InvalidInputError(
                f"expected a Datum, got {type(datum).__name__}", path=f"data[{index}]"
            )
        if loss_fn != CUSTOM:
            _check_datum(datum, loss_fn, f"data[{index}].loss_fn_inputs", is_taught)
    return datums


def check_routed_experts(data: Sequence[types.Datum], honoured: bool) -> None:
    """Check that experts are given for each token, and that the server would train with them."""
    for index, datum in enumerate(data):
        if (experts := datum.loss_fn_inputs.get(ROUTED_EXPERTS)) is None:
            continue
        path = f"data[{index}].loss_fn_inputs.{ROUTED_EXPERTS}"
        if not honoured:
            raise NotSupportedError(
                "this server cannot hold training to given experts; leave it out", path=path
            )
        if _is_text(datum.model_input) and len(experts.array) != datum.model_input.length:
            raise InvalidInputError(
                f"{len(experts.array)} rows for {datum.model_input.length} tokens of input; join "
                "those of prompt and sequence and leave out the last, as with the tokens",
                path=path,
            )


def has_signal(data: Sequence[types.Datum]) -> bool:
    """False when the datums have advantages and every one of them is zero."""
    advantages = [datum.loss_fn_inputs.get("advantages") for datum in data]
    return not advantages or any(
        tensor is None or bool(tensor.array.any()) for tensor in advantages
    )


def _is_text(model_input: types.ModelInput) -> bool:
    return all(isinstance(chunk, types.EncodedTextChunk) for chunk in model_input.chunks)


def _check_datum(datum: types.Datum, loss_fn: str, path: str, is_taught: bool) -> None:
    """All inputs that the loss needs; one target per token of the input, one of each per target."""
    inputs = datum.loss_fn_inputs
    needed = [TARGETS.name, *_needed_elsewhere(loss_fn, is_taught)]
    if missing := [name for name in needed if name not in inputs]:
        raise InvalidInputError(
            f"loss {loss_fn!r} needs {', '.join(missing)}; given: {', '.join(inputs) or 'nothing'}",
            path=path,
        )
    targets = inputs[TARGETS.name]
    if targets.dtype != TARGETS.dtype:
        raise InvalidInputError("expected int64 token ids", path=f"{path}.target_tokens")
    if targets.is_sparse:
        return  # only the stored cells are here; the server compares the shapes
    length = datum.model_input.length if _is_text(datum.model_input) else None
    if length is not None and targets.array.shape == (1, length) and length > 1:
        raise InvalidInputError(
            f"has shape [1, {length}]: a datum is one sequence, without a dimension for the batch. "
            "Take its first row, [0].",
            path=f"{path}.target_tokens",
        )
    if length is not None and targets.array.ndim > 0 and len(targets.array) != length:
        raise InvalidInputError(
            f"{len(targets.array)} targets for {length} tokens of input; each token has the one "
            "after it as its target: input tokens[:-1], targets tokens[1:]",
            path=f"{path}.target_tokens",
        )
    for name in dict.fromkeys((*needed[1:], WEIGHTS.name)):
        tensor = inputs.get(name)
        if tensor is None or tensor.is_sparse or tensor.array.size == targets.array.size:
            continue
        raise InvalidInputError(
            f"expected as many numbers as target_tokens ({targets.array.size}), got "
            f"{tensor.array.size}",
            path=f"{path}.{name}",
        )


def _needed_elsewhere(loss_fn: str, is_taught: bool) -> list[str]:
    """Inputs that every server needs; a hosted one fills in missing weights."""
    loss = LOSSES.get(loss_fn)
    loss = loss.taught() if loss is not None and is_taught else loss
    return [each.name for each in loss.needs if each is not WEIGHTS] if loss is not None else []


def check_optim_params(optim_params: Any, adam_params: Any) -> Any:
    """The one given, its numbers within their ranges."""
    if (optim_params is None) == (adam_params is None):
        raise InvalidInputError(
            "give exactly one of optim_params and adam_params", path="optim_params"
        )
    params = adam_params if optim_params is None else optim_params
    if isinstance(params, types.AdamParams):
        read_params("adamw", params.model_dump(), "optim_params")
    elif isinstance(params, types.OptimParamsBase):
        if params.type in OPTIMIZERS:  # other families are left to the server, which may know them
            read_params(params.type, params.model_dump(), "optim_params")
    elif not isinstance(params, Mapping):
        raise InvalidInputError(
            f"expected AdamParams(learning_rate=...) or its like, got {params!r}",
            path="optim_params",
        )
    return params


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is None:
        return None
    if isinstance(ttl_seconds, bool) or not isinstance(ttl_seconds, int):
        raise InvalidInputError(f"expected whole seconds, got {ttl_seconds!r}", path="ttl_seconds")
    if not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise InvalidInputError(
            f"must be between {MIN_TTL_S} (an hour) and {MAX_TTL_S} (ten years), got "
            f"{ttl_seconds}. Leave it out to keep the checkpoint.",
            path="ttl_seconds",
        )
    return ttl_seconds


def check_access_scope(access_scope: str) -> str:
    if access_scope not in ("owned", "accessible"):
        raise InvalidInputError(
            f"must be 'owned' or 'accessible', got {access_scope!r}", path="access_scope"
        )
    return access_scope


def listed(values: Any) -> Any:
    """The values as a list; as they are where they are no collection, for the message to refuse."""
    is_text = isinstance(values, str | bytes | Mapping)
    return list(values) if isinstance(values, Iterable) and not is_text else values


def check_tinker_path(
    path: Any, *, kinds: Sequence[str] = tuple(TYPE_BY_KIND), name: str = "tinker_path"
) -> tuple[str, str]:
    """(training run id, `kind/name`) of a checkpoint path."""
    parsed = TinkerPath.parse(path, kinds=kinds, path=name)
    return parsed.run_id, parsed.checkpoint_id

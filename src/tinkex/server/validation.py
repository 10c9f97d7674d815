"""Refuse a request that cannot work, before anything is queued.

Names, shapes, ranges, token ids within the vocabulary, context length, and what each loss needs;
that tensors are finite is the business of `wire`. A refusal names the field, the value and the fix.
What we do not do (dimuon, stable_reinforce, stability records) is refused by name, never accepted
and ignored. The engine checks again what depends on its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tinkex.engine.jobs import Array, CsrArray, CustomLoss, ModelInfo, SampleJob, TrainDatum
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server import decode
from tinkex.server.decode import TrainRequest

_RL = ("logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
# Loss -> (inputs it needs besides target_tokens, inputs it may have, settings it knows).
LOSSES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("weights",), ("logprobs",), ()),
    "importance_sampling": (_RL, ("weights",), ()),
    "ppo": (_RL, ("weights", *_CLIPS), _CLIPS),
    "cispo": (_RL, ("weights", *_CLIPS), _CLIPS),
    "dro": (_RL, ("weights",), ("beta",)),
    "gspo": (_RL, ("weights", "sequence_ratio_mask", *_CLIPS), _CLIPS),
    "dppo": (_RL, ("weights",), ("divergence_threshold",)),
    "kl_divergence": (("logprobs",), ("weights",), ()),
}
MAX_SAMPLES = 4096
MAX_TOPK = 1024
MAX_RANK = 512


# ------------------------------------------------------------------------------------ training


def check_train(request: TrainRequest, info: ModelInfo | None) -> None:
    """Check everything that needs no state. `info` None: the engine checks the vocabulary."""
    if not request.data:
        raise InvalidInputError("must hold at least one datum", path="data")
    if request.loss_fn == "custom":
        _check_custom(request)
    else:
        _check_loss(request)
    for index, datum in enumerate(request.data):
        _check_datum(request, index, datum, info)


def _check_loss(request: TrainRequest) -> None:
    if request.loss_fn == "stable_reinforce":
        raise NotSupportedError(
            "stable_reinforce has no public definition, so it is not offered here; "
            "use importance_sampling, ppo, cispo or a custom loss.",
            path="loss_fn",
        )
    if request.loss_fn not in LOSSES:
        raise InvalidInputError(
            f"unknown loss {request.loss_fn!r}; known: {', '.join(sorted(LOSSES))}, custom.",
            path="loss_fn",
        )
    settings = LOSSES[request.loss_fn][2]
    for name, value in request.loss_fn_config.items():
        path = f"loss_fn_config.{name}"
        if name not in settings:
            known = ", ".join(settings) or "none"
            raise InvalidInputError(
                f"{request.loss_fn} has no such setting; known: {known}.", path=path
            )
        if isinstance(value, str) or not np.isfinite(value):
            raise InvalidInputError(f"must be a finite number, got {value!r}", path=path)


def _check_custom(request: TrainRequest) -> None:
    loss_id = request.loss_fn_config.get("loss_id")
    if not isinstance(loss_id, str) or not loss_id:
        raise InvalidInputError(
            "a custom loss needs the loss_id that create_custom_loss gave",
            path="loss_fn_config.loss_id",
        )


def _check_datum(
    request: TrainRequest, index: int, datum: TrainDatum, info: ModelInfo | None
) -> None:
    where = f"data[{index}]"
    check_tokens(datum.tokens, f"{where}.model_input", info)
    targets = datum.inputs.get("target_tokens")
    if targets is None:
        raise InvalidInputError(
            f"is missing; given: {', '.join(datum.inputs) or 'nothing'}",
            path=f"{where}.loss_fn_inputs.target_tokens",
        )
    _check_targets(targets, len(datum.tokens), f"{where}.loss_fn_inputs.target_tokens", info)
    if request.loss_fn == "custom":  # its inputs are its own affair
        return
    _check_input_names(request.loss_fn, datum, where)
    for name, value in datum.inputs.items():
        if tuple(value.shape) != tuple(targets.shape):
            raise InvalidInputError(
                f"has shape {list(value.shape)}, target_tokens has {list(targets.shape)}",
                path=f"{where}.loss_fn_inputs.{name}",
            )


def _check_input_names(loss_fn: str, datum: TrainDatum, where: str) -> None:
    needs, takes, _ = LOSSES[loss_fn]
    for name in needs:
        if name not in datum.inputs:
            raise InvalidInputError(
                f"{loss_fn} needs it; given: {', '.join(datum.inputs)}",
                path=f"{where}.loss_fn_inputs.{name}",
            )
    for name in datum.inputs:
        if name not in ("target_tokens", *needs, *takes):
            raise InvalidInputError(
                f"{loss_fn} has no use for it; it reads target_tokens, "
                f"{', '.join((*needs, *takes))}. Leave it out.",
                path=f"{where}.loss_fn_inputs.{name}",
            )


def check_tokens(tokens: Array, path: str, info: ModelInfo | None) -> None:
    if len(tokens) == 0:
        raise InvalidInputError("must hold at least one token", path=path)
    if info is not None and len(tokens) > info.max_context_length:
        raise InvalidInputError(
            f"{len(tokens)} tokens exceed the context of {info.max_context_length} "
            f"of {info.base_model}; shorten it.",
            path=path,
        )
    _check_vocabulary(tokens, path, info)


def _check_vocabulary(tokens: Array, path: str, info: ModelInfo | None) -> None:
    top = info.vocab_size if info is not None else 2**31
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= top):
        bad = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        # Other libraries mark a position without a loss by this target.
        hint = (
            ". To leave a position out, keep its token and give it weight 0" if bad == -100 else ""
        )
        raise InvalidInputError(
            f"token {bad} is outside the vocabulary 0..{top - 1}{hint}", path=path
        )


def _check_targets(
    targets: Array | CsrArray, num_tokens: int, path: str, info: ModelInfo | None
) -> None:
    values = targets.values if isinstance(targets, CsrArray) else targets
    shape = targets.shape
    if values.dtype.kind != "i":
        raise InvalidInputError(f"must be int64, got {values.dtype.name}", path=path)
    if len(shape) not in (1, 2) or shape[0] != num_tokens:
        raise InvalidInputError(
            f"has shape {list(shape)}, but the model input has {num_tokens} tokens", path=path
        )
    _check_vocabulary(values, path, info)


# ------------------------------------------------------------------------------------ models


def lora_spec(body: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The fields of a `LoraSpec` from a request, `seed` filling in for one not given."""
    config = decode.mapping(body, "lora_config") or {}
    given = decode.optional_int(config, "seed", low=-(2**63))
    spec = {
        "rank": decode.integer(config, "rank", default=32, low=1, high=MAX_RANK),
        "alpha": decode.number(config, "alpha", default=32.0, low=1e-6, high=1e6),
        "seed": seed if given is None else given,
        "train_attn": decode.boolean(config, "train_attn", default=True),
        "train_mlp": decode.boolean(config, "train_mlp", default=True),
        "train_unembed": decode.boolean(config, "train_unembed", default=True),
    }
    if not any(spec[f"train_{part}"] for part in ("attn", "mlp", "unembed")):
        raise InvalidInputError(
            "at least one of train_attn, train_mlp, train_unembed must be true", path="lora_config"
        )
    return spec


def optimizer_config(body: Mapping[str, Any]) -> dict[str, Any]:
    config = decode.mapping(body, "optimizer_config") or {"type": "adamw"}
    kind = config.get("type", "adamw")
    _check_optimizer(kind, "optimizer_config.type")
    return {"type": kind}


def _check_optimizer(kind: Any, path: str) -> None:
    if kind == "dimuon":
        raise NotSupportedError(
            "dimuon's update rule is not public, so it is not offered here; use adamw, or muon.",
            path=path,
        )
    if kind not in ("adamw", "muon"):
        raise NotSupportedError(f"unknown optimizer {kind!r}; use adamw, or muon.", path=path)


def optimizer_params(body: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The parameters of an optim_step, complete and checked against the model's optimizer."""
    adam, other = decode.mapping(body, "adam_params"), decode.mapping(body, "optimizer_params")
    if (adam is None) == (other is None):
        raise InvalidInputError(
            "exactly one of adam_params and optimizer_params must be given", path="adam_params"
        )
    kind = "adamw" if adam is not None else (other or {}).get("type", "adamw")
    name = "adam_params" if adam is not None else "optimizer_params"
    _check_optimizer(kind, f"{name}.type")
    if kind != model_type:
        raise InvalidInputError(
            f"the model was created with {model_type}, these are parameters of {kind}", path=name
        )
    given = adam if adam is not None else other or {}
    try:
        params = _muon_params(given) if kind == "muon" else _adam_params(given)
    except InvalidInputError as exc:
        raise InvalidInputError(str(exc), path=name) from exc
    known = {*params, "type"}
    for key in given:
        if key not in known:
            raise InvalidInputError(
                f"unknown setting {key!r}; known: {', '.join(sorted(known))}", path=name
            )
    return params


def _adam_params(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "learning_rate": decode.number(given, "learning_rate", default=1e-4, low=0),
        "beta1": decode.number(given, "beta1", default=0.9, low=0, high=1),
        "beta2": decode.number(given, "beta2", default=0.95, low=0, high=1),
        "eps": decode.number(given, "eps", default=1e-12, low=0),
        "weight_decay": decode.number(given, "weight_decay", default=0.0, low=0),
        "grad_clip_norm": decode.number(given, "grad_clip_norm", default=0.0, low=0),
    }


def _muon_params(given: Mapping[str, Any]) -> dict[str, Any]:
    if "learning_rate" not in given:
        raise InvalidInputError("is required", path="learning_rate")
    return {
        "type": "muon",
        "learning_rate": decode.number(given, "learning_rate", default=0.0, low=0),
        "momentum": decode.number(given, "momentum", default=0.95, low=0, high=1),
        "weight_decay": decode.number(given, "weight_decay", default=0.0, low=0),
        "grad_clip_norm": decode.number(given, "grad_clip_norm", default=0.0, low=0),
    }


def custom_loss_inputs(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The declared parameters of a traced loss, each a name and a rank."""
    given = body.get("inputs")
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise InvalidInputError("must be a list of {name, rank}", path="inputs")
    return [
        {
            "name": decode.text(item, "name"),
            "rank": decode.integer(item, "rank", high=2),
        }
        for item in given
    ]


def check_graph(inputs: list[dict[str, Any]], graph: Mapping[str, Any]) -> None:
    """Refuse a graph that the engine would not rebuild."""
    from tinkex.engine.train.graph import check_graph as check

    pairs = tuple((item["name"], item["rank"]) for item in inputs)
    check(CustomLoss(inputs=pairs, graph=graph))


# ------------------------------------------------------------------------------------ sampling


def sample_job(
    body: Mapping[str, Any], *, base_model: str, folder: str | None, info: ModelInfo | None
) -> SampleJob:
    """A checked job, its id still empty."""
    prompt = decode.prompt_tokens(body.get("prompt"), "prompt")
    check_tokens(prompt, "prompt", info)
    params = decode.mapping(body, "sampling_params") or {}
    stop_tokens, stop_strings = _stops(params.get("stop"))
    job = SampleJob(
        job_id="",
        base_model=base_model,
        adapter_folder=folder,
        prompt=prompt,
        num_samples=decode.integer(body, "num_samples", default=1, low=1, high=MAX_SAMPLES),
        max_tokens=decode.optional_int(params, "max_tokens", low=1, high=2**31 - 1),
        temperature=decode.number(params, "temperature", default=1.0, low=0, high=1e6),
        top_k=decode.integer(params, "top_k", default=-1, low=-1, high=2**31 - 1),
        top_p=decode.number(params, "top_p", default=1.0, low=1e-9, high=1),
        seed=decode.optional_int(params, "seed", low=-(2**63), high=2**64 - 1),
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=decode.boolean(body, "prompt_logprobs", default=False),
        prompt_logprobs_last_n=_last_n(body, len(prompt)),
        topk_prompt_logprobs=decode.integer(body, "topk_prompt_logprobs", default=0, high=MAX_TOPK),
        topk_sample_logprobs=decode.integer(body, "topk_sample_logprobs", default=0, high=MAX_TOPK),
        target_prompt_logprobs=_prompt_targets(body, len(prompt), info),
        prompt_alt_tokens_k=decode.integer(body, "prompt_alt_tokens_k", default=0, high=MAX_TOPK),
    )
    _check_room(job, info)
    if decode.boolean(body, "record_stability_info", default=False):
        raise NotSupportedError(
            "stability records are not kept by this server; leave it false.",
            path="record_stability_info",
        )
    return job


def _check_room(job: SampleJob, info: ModelInfo | None) -> None:
    if info is None:
        return
    room = info.max_context_length - len(job.prompt)
    wanted = 1 if job.max_tokens is None else job.max_tokens
    if wanted > room:
        raise InvalidInputError(
            f"a prompt of {len(job.prompt)} tokens leaves room for {room} in the context of "
            f"{info.max_context_length}, asked for {wanted}; "
            + ("lower max_tokens." if room > 0 else "shorten the prompt."),
            path="sampling_params.max_tokens",
        )


def _stops(stop: Any) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    if stop is None:
        return None, ()
    items = [stop] if isinstance(stop, str) else stop
    if isinstance(items, list):
        if not items:
            return (), ()
        if all(isinstance(item, str) and item for item in items):
            return None, tuple(items)
        if all(type(item) is int and 0 <= item < 2**31 for item in items):
            return tuple(items), ()
    raise InvalidInputError(
        "must be a text, a list of texts or a list of token ids, none of them empty (an empty "
        f"list: no stop), got {repr(stop)[:80]}",
        path="sampling_params.stop",
    )


def _last_n(body: Mapping[str, Any], num_tokens: int) -> int | None:
    last_n = decode.optional_int(body, "prompt_logprobs_last_n", low=1)
    if last_n is None:
        return None
    if not body.get("prompt_logprobs"):
        raise InvalidInputError("needs prompt_logprobs", path="prompt_logprobs_last_n")
    if last_n > num_tokens - 1:
        raise InvalidInputError(
            f"must be 1 to {num_tokens - 1} for a prompt of {num_tokens} tokens, got {last_n}",
            path="prompt_logprobs_last_n",
        )
    return last_n


def _prompt_targets(
    body: Mapping[str, Any], num_tokens: int, info: ModelInfo | None
) -> Array | CsrArray | None:
    given = body.get("target_prompt_logprobs")
    if given is None:
        return None
    path = "target_prompt_logprobs"
    targets = decode.json_tensor(given, path)
    values = targets.values if isinstance(targets, CsrArray) else targets
    if values.dtype.kind != "i" or len(targets.shape) != 2 or targets.shape[0] != num_tokens - 1:
        raise InvalidInputError(
            f"must be int64 of shape [{num_tokens - 1}, K], got {values.dtype.name} of shape "
            f"{list(targets.shape)}",
            path=path,
        )
    if values.size and int(values.min()) < -1:
        raise InvalidInputError(f"ids must be -1 (skip) or more, got {values.min()}", path=path)
    _check_vocabulary(values[values >= 0], path, info)
    return targets

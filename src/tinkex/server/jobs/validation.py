"""Refuse a request that cannot work, before anything is queued.

Token ids within the vocabulary, context length, and what `contract` declares of losses, optimizers
and samples; that tensors are finite is the business of `wire`. A refusal names the field, the value
and the fix. What we do not do (stability records) is refused by name, never accepted and ignored.
The engine checks again, by the same declarations, and what depends on its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import fields
from typing import Any

from tinkex.contract.losses import CUSTOM, Loss, check_inputs, find_loss, read_settings
from tinkex.contract.optimizers import OptimizerParams, find_optimizer, read_params
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.sampling import (
    DrawSettings,
    SampleOptions,
    check_draws,
    check_vocabulary,
    read_stop,
)
from tinkex.engine.jobs import Array, CsrArray, ModelInfo, SampleJob, TracedLoss, TrainDatum
from tinkex.engine.numerics import routed_experts
from tinkex.engine.numerics.arrays import check_dense_bytes, form_of, sparse_inputs
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server.jobs import decode
from tinkex.server.jobs.decode import TrainRequest
from tinkex.server.jobs.teaching import check_untaught
from tinkex.types import LoraConfig, OptimizerConfigBase, OptimStepRequest, SampleRequest

DEFAULT_RANK, DEFAULT_ALPHA = 32, 32.0
_DRAW = [field.name for field in fields(DrawSettings)]
_OPTIONS: dict[str, Any] = {field.name: field.default for field in fields(SampleOptions)}
TOKEN_BYTES, PAIR_BYTES = 8, 8
"""What a token with its logprob, and each alternative to it, take in a result."""


# ------------------------------------------------------------------------------------ training


def check_train(request: TrainRequest, info: ModelInfo | None) -> None:
    """Check everything that needs no state. `info` None: the engine checks the vocabulary."""
    if not request.data:
        raise InvalidInputError("must hold at least one datum", path="data")
    loss = None
    if request.loss_fn == CUSTOM:
        _check_custom(request)
    else:
        loss = find_loss(request.loss_fn)
        read_settings(loss, request.loss_fn_config)
    if request.teaching is not None:
        check_untaught(request.teaching, request.loss_fn, request.data)
        loss = loss and loss.taught()
    for index, datum in enumerate(request.data):
        _check_datum(loss, index, datum, info)
    if sparse := sparse_inputs(request.data):
        check_dense_bytes(sparse, [len(datum.tokens) for datum in request.data])


def _check_custom(request: TrainRequest) -> None:
    loss_id = request.loss_fn_config.get("loss_id")
    if not isinstance(loss_id, str) or not loss_id:
        raise InvalidInputError(
            "a custom loss needs the loss_id that create_custom_loss gave",
            path="loss_fn_config.loss_id",
        )


def _check_datum(loss: Loss | None, index: int, datum: TrainDatum, info: ModelInfo | None) -> None:
    where = f"data[{index}]"
    check_tokens(datum.tokens, f"{where}.model_input", info)
    fields = f"{where}.loss_fn_inputs"
    forms = {name: form_of(value) for name, value in datum.inputs.items()}
    check_inputs(loss, forms, num_tokens=len(datum.tokens), path=fields)
    targets = datum.inputs["target_tokens"]
    ids = targets.values if isinstance(targets, CsrArray) else targets
    _check_vocabulary(ids, f"{fields}.target_tokens", info)
    if datum.routed_experts is not None and info is not None:
        path = f"{fields}.{ROUTED_EXPERTS}"
        experts = routed_experts.require(info.experts, info.base_model, path)
        routed_experts.unpack(datum.routed_experts, experts, len(datum.tokens), path)


def check_tokens(tokens: Array, path: str, info: ModelInfo | None) -> None:
    if len(tokens) == 0:
        raise InvalidInputError("must hold at least one token", path=path)
    if info is not None:
        check_length(tokens, path, info)
    _check_vocabulary(tokens, path, info)


def check_length(tokens: Sized, path: str, info: ModelInfo) -> None:
    if len(tokens) > info.max_context_length:
        raise InvalidInputError(
            f"{len(tokens)} tokens exceed the context of {info.max_context_length} "
            f"of {info.base_model}; shorten it.",
            path=path,
        )


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


# ------------------------------------------------------------------------------------ models


def lora_spec(config: LoraConfig | None, seed: int) -> dict[str, Any]:
    """The fields of a `LoraSpec` as asked for, `seed` filling in for one not given."""
    wanted = config or LoraConfig(rank=DEFAULT_RANK)
    spec = wanted.model_dump() | {
        "seed": seed if wanted.seed is None else wanted.seed,
        "alpha": DEFAULT_ALPHA if wanted.alpha is None else wanted.alpha,
    }
    if not any(spec[f"train_{part}"] for part in ("attn", "mlp", "unembed")):
        raise InvalidInputError(
            "at least one of train_attn, train_mlp, train_unembed must be true", path="lora_config"
        )
    return spec


def optimizer_config(config: OptimizerConfigBase) -> dict[str, Any]:
    find_optimizer(config.type, "optimizer_config.type")
    return {"type": config.type}


def optimizer_params(request: OptimStepRequest, model_type: str) -> OptimizerParams:
    """The parameters of an optim_step, complete and checked against the model's optimizer."""
    params = request.optim_params.model_dump()
    kind = params.get("type", "adamw")
    find_optimizer(kind, "optimizer_params.type")
    if kind != model_type:
        raise InvalidInputError(
            f"the model was created with {model_type}, these are parameters of {kind}",
            path="optim_params",
        )
    return read_params(kind, params, "optim_params")


def check_graph(inputs: list[dict[str, Any]], graph: Mapping[str, Any]) -> None:
    """Refuse a graph that the engine would not rebuild."""
    from tinkex.engine.train.graph_program import check_graph as check

    pairs = tuple((item["name"], item["rank"]) for item in inputs)
    check(TracedLoss(inputs=pairs, graph=graph))


def check_traced_work(loss: TracedLoss, data: Sequence[TrainDatum]) -> None:
    """Refuse datums for which a traced loss is too much work, as far as their shapes tell."""
    from tinkex.engine.train.graph_shapes import check_work

    check_work(loss, data)


# ------------------------------------------------------------------------------------ sampling


def sample_job(
    request: SampleRequest,
    *,
    job_id: str = "",
    base_model: str,
    folder: str | None,
    info: ModelInfo | None,
    tenant: str = "",
    stream: bool = False,
) -> SampleJob:
    """A checked job."""
    prompt = decode.tokens_of(request.prompt, "prompt")
    check_tokens(prompt, "prompt", info)
    params = request.sampling_params
    stop_tokens, stop_strings = read_stop(params.stop, "sampling_params.stop")
    job = SampleJob(
        job_id=job_id,
        base_model=base_model,
        adapter_folder=folder,
        prompt=prompt,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        target_prompt_logprobs=_prompt_targets(request, len(prompt), info),
        stream=stream,
        tenant=tenant,
        # In range already: the fields of the messages are those that `contract` declares.
        **{name: getattr(params, name) for name in _DRAW},
        **{name: getattr(request, name) or default for name, default in _OPTIONS.items()},
    )
    if info is not None:
        check_vocabulary(job, info.vocab_size, "sampling_params")
        if job.routed_experts:
            routed_experts.require(info.experts, info.base_model, ROUTED_EXPERTS)
    _check_last_n(job)
    if job.prompt_alt_tokens_k:
        check_draws(job, len(prompt))
    _check_room(job, info)
    if request.record_stability_info:
        raise NotSupportedError(
            "stability records are not kept by this server: only stable_reinforce reads them, "
            "and it has no public definition. Leave it false and train with another loss "
            "(tinker-cookbook: loss_fn=importance_sampling).",
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


def check_result_size(job: SampleJob, info: ModelInfo | None, max_bytes: int) -> int:
    """The size of a result at its longest; refused where the server would not keep so much."""
    room = max((info.max_context_length if info else 0) - len(job.prompt), 0)
    max_tokens = room if job.max_tokens is None else job.max_tokens
    sampled = job.num_samples * max_tokens * (TOKEN_BYTES + PAIR_BYTES * job.topk_sample_logprobs)
    per_token = job.topk_prompt_logprobs + job.prompt_alt_tokens_k
    prompted = len(job.prompt) * (TOKEN_BYTES + PAIR_BYTES * per_token)
    routed = ""
    if job.routed_experts and info is not None and info.experts is not None:
        expert_bytes = info.experts.bytes_per_token
        sampled += job.num_samples * max_tokens * expert_bytes
        prompted += len(job.prompt) * expert_bytes
        routed = f" and {expert_bytes} bytes of routed_experts a token"
    if sampled + prompted > max_bytes:
        raise InvalidInputError(
            f"num_samples {job.num_samples} x max_tokens {max_tokens} with "
            f"{job.topk_sample_logprobs} alternatives each{routed} and {len(job.prompt)} tokens of "
            f"a prompt with {per_token} each may take {sampled + prompted} bytes, "
            f"the server keeps {max_bytes} per request. Lower one of them, or ask in parts.",
            path="num_samples",
        )
    return sampled + prompted


def _check_last_n(job: SampleJob) -> None:
    last_n, num_tokens = job.prompt_logprobs_last_n, len(job.prompt)
    if last_n is None:
        return
    if not job.prompt_logprobs:
        raise InvalidInputError("needs prompt_logprobs", path="prompt_logprobs_last_n")
    if last_n > num_tokens - 1:
        raise InvalidInputError(
            f"must be 1 to {num_tokens - 1} for a prompt of {num_tokens} tokens, got {last_n}",
            path="prompt_logprobs_last_n",
        )


def _prompt_targets(
    request: SampleRequest, num_tokens: int, info: ModelInfo | None
) -> Array | CsrArray | None:
    if request.target_prompt_logprobs is None:
        return None
    path = "target_prompt_logprobs"
    targets = decode.array_of(request.target_prompt_logprobs)
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

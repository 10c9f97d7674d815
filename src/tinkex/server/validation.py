"""Refuse a request that cannot work, before anything is queued.

Token ids within the vocabulary, context length, and what `contract` declares of losses, optimizers
and samples; that tensors are finite is the business of `wire`. A refusal names the field, the value
and the fix. What we do not do (stability records) is refused by name, never accepted and ignored.
The engine checks again, by the same declarations, and what depends on its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.contract.losses import CUSTOM, Loss, check_inputs, find_loss, read_settings
from tinkex.contract.optimizers import OptimizerParams, find_optimizer, read_params
from tinkex.contract.sampling import read_draw, read_options, read_stop
from tinkex.engine.arrays import form_of
from tinkex.engine.jobs import Array, CsrArray, CustomLoss, ModelInfo, SampleJob, TrainDatum
from tinkex.errors import InvalidInputError, NotSupportedError
from tinkex.server import decode
from tinkex.server.decode import TrainRequest

MAX_RANK = 512


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
    for index, datum in enumerate(request.data):
        _check_datum(loss, index, datum, info)


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
    config = decode.mapping(body, "optimizer_config") or {}
    kind = config.get("type", "adamw")
    find_optimizer(kind, "optimizer_config.type")
    return {"type": kind}


def optimizer_params(body: Mapping[str, Any], model_type: str) -> OptimizerParams:
    """The parameters of an optim_step, complete and checked against the model's optimizer."""
    adam, other = decode.mapping(body, "adam_params"), decode.mapping(body, "optimizer_params")
    if (adam is None) == (other is None):
        raise InvalidInputError(
            "exactly one of adam_params and optimizer_params must be given", path="adam_params"
        )
    name = "adam_params" if adam is not None else "optimizer_params"
    given = adam if adam is not None else other or {}
    kind = given.get("type", "adamw") if adam is None else "adamw"
    find_optimizer(kind, f"{name}.type")
    if kind != model_type:
        raise InvalidInputError(
            f"the model was created with {model_type}, these are parameters of {kind}", path=name
        )
    return read_params(kind, given, name)


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
    stop_tokens, stop_strings = read_stop(params.get("stop"), "sampling_params.stop")
    job = SampleJob(
        job_id="",
        base_model=base_model,
        adapter_folder=folder,
        prompt=prompt,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        target_prompt_logprobs=_prompt_targets(body, len(prompt), info),
        **read_draw(params),
        **read_options(body),
    )
    _check_last_n(job)
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


def _check_last_n(job: SampleJob) -> None:
    last_n, num_tokens = job.prompt_logprobs_last_n, len(job.prompt)
    if last_n is not None and last_n > num_tokens - 1:
        raise InvalidInputError(
            f"must be 1 to {num_tokens - 1} for a prompt of {num_tokens} tokens, got {last_n}",
            path="prompt_logprobs_last_n",
        )


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

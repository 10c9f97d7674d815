"""A sample as the caller asks for it: checked, made into a request, compared with the answer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from tinkex import types
from tinkex.client.session.flags import ServerFlags
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.sampling import (
    DrawSettings,
    SampleOptions,
    check_honoured,
    read_draw,
    read_options,
    read_stop,
)
from tinkex.contract.settings import settings_of
from tinkex.errors import (
    APIResponseValidationError,
    InvalidInputError,
    NotSupportedError,
)
from tinkex.types.data.tensor_data import from_list


def _names(declared: type) -> tuple[str, ...]:
    return tuple(setting.name for setting in settings_of(declared))


_DRAW, _OPTIONS = _names(DrawSettings), _names(SampleOptions)
_draw_of, _options_of = attrgetter(*_DRAW), attrgetter(*_OPTIONS)


# Thousands of samples are alike, so verdicts are kept. Typed: 1 is not True.
@lru_cache(maxsize=256, typed=True)
def _check_draw(*values: Any) -> None:
    read_draw(dict(zip(_DRAW, values, strict=True)))


@lru_cache(maxsize=256, typed=True)
def _check_options(*values: Any) -> None:
    read_options(dict(zip(_OPTIONS, values, strict=True)))


def _check(check: Any, values: Iterable[Any]) -> None:
    try:
        check(*values)
    except TypeError:  # a value that cannot be a key
        check.__wrapped__(*values)


def sample_request(
    prompt: types.ModelInput,
    num_samples: int,
    sampling_params: types.SamplingParams,
    **options: Any,
) -> types.SampleRequest:
    """A request that has everything but its number; `options` are further fields of it.

    Raises:
        InvalidInputError: With the path of the first thing that is wrong.
    """
    if not isinstance(prompt, types.ModelInput):
        raise InvalidInputError(
            f"expected a ModelInput, got {type(prompt).__name__}. Use "
            "ModelInput.from_ints(tokens).",
            path="prompt",
        )
    if not isinstance(sampling_params, types.SamplingParams):
        raise InvalidInputError(
            f"expected SamplingParams, got {type(sampling_params).__name__}",
            path="sampling_params",
        )
    _check(_check_draw, _draw_of(sampling_params))
    read_stop(sampling_params.stop, "sampling_params.stop")
    request = types.SampleRequest.unchecked(
        prompt=prompt, sampling_params=sampling_params, num_samples=num_samples, **options
    )
    _check(_check_options, _options_of(request))
    return request


def check_supported(request: types.SampleRequest, flags: ServerFlags) -> None:
    """Refuse what this server would ignore."""
    check_honoured(request.sampling_params, flags.tinkex_sampling_params)
    if request.routed_experts and not flags.tinkex_routed_experts:
        raise NotSupportedError(
            "this server does not tell which experts a token passed; leave it out",
            path=ROUTED_EXPERTS,
        )


def check_answer(request: types.SampleRequest, answer: types.SampleResponse) -> None:
    """Refuse an answer that lacks what was asked for (6.1)."""
    if request.prompt_alt_tokens_k > 0 and answer.prompt_alt_tokens is None:
        raise APIResponseValidationError(
            "prompt_alt_tokens_k was asked for and the server sent none; it may predate it."
        )
    if request.routed_experts and answer.prompt_routed_experts is None:
        raise APIResponseValidationError(
            "routed_experts were asked for and the server sent none; it may predate them."
        )
    if request.prompt_logprobs_last_n is not None and answer.prompt_logprobs_np is not None:
        early = answer.prompt_logprobs_np[: -request.prompt_logprobs_last_n]
        if early.size and not np.isnan(early).all():
            raise APIResponseValidationError(
                "prompt_logprobs_last_n was ignored by the server; it may predate it."
            )


def target_tensor(value: Any) -> types.TensorData | None:
    """`target_prompt_logprobs` as a tensor of token ids: [length - 1, K], -1 skips a cell."""
    if value is None or isinstance(value, types.TensorData):
        tensor = value
    elif isinstance(value, (list, tuple)):
        tensor = from_list(value, types.TensorDtype.INT64)
    elif hasattr(value, "detach"):
        tensor = types.TensorData.from_torch_sparse(value, pad_value=-1)
    else:
        tensor = types.TensorData.from_numpy(value)
    if tensor is not None and tensor.dtype != "int64":
        raise InvalidInputError("expected token ids (int64)", path="target_prompt_logprobs")
    return tensor

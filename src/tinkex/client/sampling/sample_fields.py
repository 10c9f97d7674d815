"""What a caller asks of a sample: checked, turned into a body, and compared with the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import orjson

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
from tinkex.wire.chunking import model_input_size


def _remembering(
    read: Callable[[dict[str, Any]], object], declared: type
) -> Callable[[Any], object]:
    """A check of declared settings that keeps its verdicts: thousands of samples are alike."""
    names = tuple(setting.name for setting in settings_of(declared))
    values_of = attrgetter(*names)

    def judge(*values: Any) -> None:
        read(dict(zip(names, values, strict=True)))

    judge_once = lru_cache(maxsize=256, typed=True)(judge)  # typed: 1 is not True

    def check(asked: Any) -> None:
        values = values_of(asked)
        try:
            judge_once(*values)
        except TypeError:  # a value that cannot be a key
            judge(*values)

    return check


_check_draw = _remembering(read_draw, DrawSettings)
_check_options = _remembering(read_options, SampleOptions)
_SAMPLING_PARAMS = tuple(types.SamplingParams.model_fields)
_params_of = attrgetter(*_SAMPLING_PARAMS)


@dataclass(slots=True, kw_only=True)
class SampleFields:
    """What the caller asked for, by the names of the wire, checked, and the body it becomes."""

    prompt: types.ModelInput
    num_samples: int
    sampling_params: types.SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: types.TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    routed_experts: bool = False
    record_stability_info: bool = False
    size_bytes: int = field(default=0, init=False)

    def check(self) -> None:
        if not isinstance(self.prompt, types.ModelInput):
            raise InvalidInputError(
                f"expected a ModelInput, got {type(self.prompt).__name__}. Use "
                "ModelInput.from_ints(tokens).",
                path="prompt",
            )
        if not isinstance(self.sampling_params, types.SamplingParams):
            raise InvalidInputError(
                f"expected SamplingParams, got {type(self.sampling_params).__name__}",
                path="sampling_params",
            )
        _check_draw(self.sampling_params)
        read_stop(self.sampling_params.stop, "sampling_params.stop")
        _check_options(self)
        self.size_bytes = model_input_size(self.prompt, bytes_per_token=10)

    def check_honoured(self, flags: ServerFlags) -> None:
        """Refuse what this server would ignore."""
        check_honoured(self.sampling_params, flags.tinkex_sampling_params)
        if self.routed_experts and not flags.tinkex_routed_experts:
            raise NotSupportedError(
                "this server does not tell which experts a token passed; leave it out",
                path=ROUTED_EXPERTS,
            )

    def body(self, sampling_session_id: str, seq_id: int) -> bytes:
        """The JSON of one sample; what `requests.encode` writes, made faster.

        The bytes are equal but for floats that have two spellings: 1e-05 there, 1e-5 here.
        """
        pairs = zip(_SAMPLING_PARAMS, _params_of(self.sampling_params), strict=True)
        chosen = {
            # In JSON, keys are text.
            name: value if type(value) is not dict else {str(k): v for k, v in value.items()}
            for name, value in pairs
            if value is not None
        }
        body: dict[str, Any] = {
            "num_samples": self.num_samples,
            "prompt": self.prompt.to_dict(),
            "sampling_params": chosen,
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "prompt_logprobs": self.prompt_logprobs,
            "topk_prompt_logprobs": self.topk_prompt_logprobs,
            "topk_sample_logprobs": self.topk_sample_logprobs,
        }
        if self.target_prompt_logprobs is not None:
            body["target_prompt_logprobs"] = self.target_prompt_logprobs.to_dict()
        body["prompt_alt_tokens_k"] = self.prompt_alt_tokens_k
        if self.prompt_logprobs_last_n is not None:
            body["prompt_logprobs_last_n"] = self.prompt_logprobs_last_n
        if self.routed_experts:
            body["routed_experts"] = True
        body["record_stability_info"] = self.record_stability_info
        body["type"] = "sample"
        return orjson.dumps(body)

    def check_answer(self, answer: types.SampleResponse) -> None:
        """Refuse an answer that lacks what was asked for (6.1)."""
        if self.prompt_alt_tokens_k > 0 and answer.prompt_alt_tokens is None:
            raise APIResponseValidationError(
                "prompt_alt_tokens_k was asked for and the server sent none; it may predate it."
            )
        if self.routed_experts and answer.prompt_routed_experts is None:
            raise APIResponseValidationError(
                "routed_experts were asked for and the server sent none; it may predate them."
            )
        if self.prompt_logprobs_last_n is not None and answer.prompt_logprobs_np is not None:
            early = answer.prompt_logprobs_np[: -self.prompt_logprobs_last_n]
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

"""What a caller asks of a sample: checked, turned into a body, and compared with the answer."""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from tinkex import types
from tinkex.client.http import codec
from tinkex.client.session.flags import ServerFlags
from tinkex.contract.routing import NAME as ROUTED_EXPERTS
from tinkex.contract.sampling import (
    DrawSettings,
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
from tinkex.wire.chunking import model_input_size

__all__ = ["SampleFields"]

_DRAW_NAMES = tuple(setting.name for setting in settings_of(DrawSettings))
_draw_of = attrgetter(*_DRAW_NAMES)


# Thousands of samples are asked for alike, so a verdict is remembered. `typed`: 1 is not True.
@lru_cache(maxsize=256, typed=True)
def _check_draw(*values: Any) -> None:
    read_draw(dict(zip(_DRAW_NAMES, values, strict=True)))


@lru_cache(maxsize=256, typed=True)
def _check_options(
    num_samples: int,
    prompt_logprobs: bool,
    last_n: int | None,
    topk_prompt: int,
    topk_sample: int,
    alt_k: int,
    routed_experts: bool,
) -> None:
    read_options(
        {
            "num_samples": num_samples,
            "prompt_logprobs": prompt_logprobs,
            "prompt_logprobs_last_n": last_n,
            "topk_prompt_logprobs": topk_prompt,
            "topk_sample_logprobs": topk_sample,
            "prompt_alt_tokens_k": alt_k,
            "routed_experts": routed_experts,
        }
    )


class SampleFields:
    """What the caller asked for, checked, and the body it becomes."""

    __slots__ = (
        "_body",
        "alt_k",
        "last_n",
        "num_samples",
        "params",
        "prompt",
        "prompt_logprobs",
        "routed_experts",
        "size_bytes",
        "stability",
        "target",
        "topk_prompt",
        "topk_sample",
    )

    def __init__(
        self,
        *,
        prompt: types.ModelInput,
        num_samples: int,
        params: types.SamplingParams,
        prompt_logprobs: bool = False,
        topk_prompt: int = 0,
        topk_sample: int = 0,
        target: types.TensorData | None = None,
        alt_k: int = 0,
        last_n: int | None = None,
        stability: bool = False,
        routed_experts: bool = False,
    ) -> None:
        self.prompt = prompt
        self.num_samples = num_samples
        self.params = params
        self.prompt_logprobs = prompt_logprobs
        self.topk_prompt = topk_prompt
        self.topk_sample = topk_sample
        self.target = target
        self.alt_k = alt_k
        self.last_n = last_n
        self.stability = stability
        self.routed_experts = routed_experts
        self.size_bytes = 0

    def check(self) -> None:
        if not isinstance(self.prompt, types.ModelInput):
            raise InvalidInputError(
                f"expected a ModelInput, got {type(self.prompt).__name__}. Use "
                "ModelInput.from_ints(tokens).",
                path="prompt",
            )
        if not isinstance(self.params, types.SamplingParams):
            raise InvalidInputError(
                f"expected SamplingParams, got {type(self.params).__name__}", path="sampling_params"
            )
        self._check_draw()
        read_stop(self.params.stop, "sampling_params.stop")
        _check_options(
            self.num_samples,
            self.prompt_logprobs,
            self.last_n,
            self.topk_prompt,
            self.topk_sample,
            self.alt_k,
            self.routed_experts,
        )
        self.size_bytes = model_input_size(self.prompt, bytes_per_token=10)

    def check_honoured(self, flags: ServerFlags) -> None:
        """Refuse what this server would ignore."""
        check_honoured(self.params, flags.tinkex_sampling_params.split(","))
        if self.routed_experts and not flags.tinkex_routed_experts:
            raise NotSupportedError(
                "this server does not tell which experts a token passed; leave it out",
                path=ROUTED_EXPERTS,
            )

    def _check_draw(self) -> None:
        values = _draw_of(self.params)
        try:
            _check_draw(*values)
        except TypeError:  # a value that cannot be a key
            read_draw(dict(zip(_DRAW_NAMES, values, strict=True)))

    def body(self, sampling_session_id: str, seq_id: int) -> bytes:
        return codec.sample_body(self, sampling_session_id, seq_id)

    def check_answer(self, answer: types.SampleResponse) -> None:
        """Refuse an answer that lacks what was asked for (6.1)."""
        if self.alt_k > 0 and answer.prompt_alt_tokens is None:
            raise APIResponseValidationError(
                "prompt_alt_tokens_k was asked for and the server sent none; it may predate it."
            )
        if self.routed_experts and answer.prompt_routed_experts is None:
            raise APIResponseValidationError(
                "routed_experts were asked for and the server sent none; it may predate them."
            )
        if self.last_n is not None and answer.prompt_logprobs_np is not None:
            early = answer.prompt_logprobs_np[: -self.last_n]
            if early.size and not np.isnan(early).all():
                raise APIResponseValidationError(
                    "prompt_logprobs_last_n was ignored by the server; it may predate it."
                )

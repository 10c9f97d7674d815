"""The parameters of a sample: how tokens are drawn, how many, and which logprobs come back.

A class here is both the declaration and a part of the job that travels to an engine. How a token is
drawn is `engine.sample.sampling_math`. The two have no slots, because a job inherits both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from tinkex.contract.bounds import Between, TokenNumbers
from tinkex.contract.cost import NOTHING, RESULT, Cost
from tinkex.contract.settings import read_all, settings_of, shown
from tinkex.errors import InvalidInputError, NotSupportedError

MAX_STOP_TEXTS, MAX_STOP_TOKENS = 128, 4096
MAX_STOP_CHARACTERS = 4096
_INT32 = 2**31 - 1
EMPTY_LOGPROB = -99999.0
"""With token id 0, the mark of a cell of likeliest tokens that holds nothing."""

MaxTokens: TypeAlias = Annotated[
    int,
    Between(0, _INT32, becomes="result_bytes"),
    "Most tokens to generate; 0 only scores the prompt. None: until a stop, at most the context "
    "that is left.",
]
Seed: TypeAlias = Annotated[
    int,
    Between(-(2**63), 2**64 - 1, becomes=NOTHING),
    "Sample i depends on (seed, i) only, whatever else is in the batch. None: a fresh one.",
]
Temperature: TypeAlias = Annotated[
    float, Between(0, 1e6), "The logits are divided by it; 0 takes the likeliest token."
]
TopK: TypeAlias = Annotated[
    int,
    Between(-1, _INT32, becomes=NOTHING),
    "Only the k likeliest tokens are drawn. -1 or 0: off.",
]
TopP: TypeAlias = Annotated[
    float,
    Between(above=0, at_most=1),
    "Keeps the fewest likeliest tokens whose probabilities, after top_k, add up to this. 1: off.",
]
MinP: TypeAlias = Annotated[
    float,
    Between(0, 1),
    "Drops tokens less likely than this times the likeliest one, after top_k and top_p. "
    "None or 0: off.",
]
LogitBias: TypeAlias = Annotated[
    dict[int, float],
    TokenNumbers(Between(-100, 100), at_most=1024),
    "Added to the logits of these tokens before anything else. None or empty: off.",
]


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """How tokens are drawn: the fields of `sampling_params`, except `stop`."""

    max_tokens: MaxTokens | None = None
    seed: Seed | None = None
    temperature: Temperature = 1.0
    top_k: TopK = -1
    top_p: TopP = 1.0
    min_p: MinP | None = None
    logit_bias: LogitBias | None = None


_OF_TOKENS = tuple(
    setting.name for setting in settings_of(DrawSettings) if isinstance(setting.rule, TokenNumbers)
)
_SDK_NAMES = ("max_tokens", "seed", "temperature", "top_k", "top_p")
EXTENSIONS = tuple(
    setting.name for setting in settings_of(DrawSettings) if setting.name not in _SDK_NAMES
)
"""Draw settings that the Tinker SDK does not have. None is their default and means off, which keeps
them off the wire; a server announces those it honours, because others would ignore them."""


NumSamples: TypeAlias = Annotated[
    int, Between(1, 4096, becomes="result_bytes"), "Samples of the one prompt."
]
NumLikeliest: TypeAlias = Annotated[int, Between(0, 1024, becomes="result_bytes")]
NumAlternatives: TypeAlias = Annotated[int, Between(0, 1024, becomes="draws")]
LastN: TypeAlias = Annotated[
    int,
    Between(1, _INT32, becomes=NOTHING),
    "Score only the last n tokens of the prompt. None: all.",
]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How many samples, and which logprobs: fields of a sample request."""

    num_samples: NumSamples = 1
    prompt_logprobs: Annotated[bool, Between(), "Score the prompt, at temperature 1."] = False
    prompt_logprobs_last_n: LastN | None = None
    topk_prompt_logprobs: Annotated[
        NumLikeliest, "Also the k likeliest tokens at each place of the prompt."
    ] = 0
    topk_sample_logprobs: Annotated[
        NumLikeliest, "Also the k likeliest tokens at each sampled token."
    ] = 0
    prompt_alt_tokens_k: Annotated[
        NumAlternatives, "Draw k other tokens at each place of the prompt."
    ] = 0
    routed_experts: Annotated[
        bool, Between(), "Of a mixture: also the experts that each token passed."
    ] = False


def read_draw(given: Mapping[str, Any]) -> dict[str, Any]:
    """The draw settings of a `sampling_params` object, complete and checked."""
    known = settings_of(DrawSettings)
    # None is how a client leaves a field out; fields of other servers are not ours to judge.
    numbers = {s.name: given[s.name] for s in known if given.get(s.name) is not None}
    return read_all(known, numbers, of="sampling_params", path="sampling_params")


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sample options among the fields of a request, complete and checked."""
    known = settings_of(SampleOptions)
    named = {s.name: given[s.name] for s in known if given.get(s.name) is not None}
    options = read_all(known, named, of="a sample request")
    if options["prompt_logprobs_last_n"] is not None and not options["prompt_logprobs"]:
        raise InvalidInputError(
            "needs prompt_logprobs (include_prompt_logprobs in the SDK)",
            path="prompt_logprobs_last_n",
        )
    return options


def check_vocabulary(draw: DrawSettings, vocab_size: int, path: str = "") -> None:
    """Refuse settings for tokens that the model does not have."""
    for name in _OF_TOKENS:
        given = getattr(draw, name)
        if given and (last := max(map(int, given))) >= vocab_size:
            raise InvalidInputError(
                f"token {last} is outside the vocabulary 0..{vocab_size - 1}",
                path=f"{path}.{name}" if path else name,
            )


def check_draws(options: SampleOptions, num_tokens: int) -> None:
    """Refuse more draws at the places of a prompt than others can wait for.

    Each reads a row of the vocabulary, and those of a whole stretch of the prompt are one pass.
    """
    cost = Cost(draws=options.prompt_alt_tokens_k * (num_tokens - 1))
    if exceeded := RESULT.exceeded(cost):
        raise InvalidInputError(
            f"{options.prompt_alt_tokens_k} at each place of {num_tokens} tokens are {exceeded}; "
            "ask for fewer, or shorten the prompt",
            path="prompt_alt_tokens_k",
        )


def check_honoured(params: Any, honoured: str) -> None:
    """Refuse extensions that a server does not announce: it would ignore them without a word.

    `honoured` is its announcement, the names with commas between them.
    """
    for name in EXTENSIONS:
        if getattr(params, name) is not None and name not in honoured.split(","):
            raise NotSupportedError(
                "this server does not know it; leave it out", path=f"sampling_params.{name}"
            )


def read_stop(stop: Any, path: str) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """(token ids, texts) that end a sequence, from a `stop` as it is given.

    (None, ()) means the model's own end tokens; ((), ()) means that nothing but `max_tokens` ends
    a sequence.
    """
    if stop is None:
        return None, ()
    items = [stop] if isinstance(stop, str) else stop
    if isinstance(items, list):
        if not items:
            return (), ()
        texts = tuple(
            item for item in items if isinstance(item, str) and 0 < len(item) <= MAX_STOP_CHARACTERS
        )
        ids = tuple(item for item in items if type(item) is int and 0 <= item <= _INT32)
        if len(texts) + len(ids) == len(items):
            if len(texts) <= MAX_STOP_TEXTS and len(ids) <= MAX_STOP_TOKENS:
                return ids or None, texts
    raise InvalidInputError(
        f"must be a text or a list of texts (at most {MAX_STOP_TEXTS}, of 1 to "
        f"{MAX_STOP_CHARACTERS} characters) and token ids (at most {MAX_STOP_TOKENS}; an empty "
        "list: no stop), "
        f"got {shown(stop)}",
        path=path,
    )

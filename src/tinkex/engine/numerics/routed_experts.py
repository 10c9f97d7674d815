"""`routed_experts` of `contract.routing` as arrays: packed for the wire, unpacked and checked.

Numpy only: the server judges with the same function as the engine.

Shapes: T tokens, L layers with experts, k experts of a token, W words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkex.contract.routing import NOT_RECORDED, PER_WORD, ExpertCounts
from tinkex.errors import InvalidInputError, NotSupportedError


def pack(chosen_TLk: NDArray[np.int16]) -> NDArray[np.int64]:
    """Numbers of experts as words."""
    fill = -chosen_TLk.shape[2] % PER_WORD
    padded = np.pad(chosen_TLk, ((0, 0), (0, 0), (0, fill)), constant_values=NOT_RECORDED)
    return np.ascontiguousarray(padded, "<i2").view("<i8")


def require(experts: ExpertCounts | None, model: str, path: str) -> ExpertCounts:
    """Refuse a model of which no routing is known."""
    if experts is None:
        raise NotSupportedError(
            f"{model} has no experts whose choice could be recorded or prescribed: it is no "
            "mixture, or it runs through transformers. Leave routed_experts out.",
            path=path,
        )
    return experts


def unpack(words: Any, experts: ExpertCounts, num_tokens: int, path: str) -> NDArray[np.int16]:
    """[T, L, k] from the words of a datum; -1 where the router chooses.

    Raises:
        InvalidInputError: Names what is wrong, and where.
    """
    shape = (num_tokens, experts.layers, experts.num_words)
    if not isinstance(words, np.ndarray) or words.dtype != np.int64 or words.shape != shape:
        kind = getattr(words, "dtype", "sparse")
        raise InvalidInputError(
            f"must be int64 of shape {list(shape)} (a row per token of the model input, layers "
            f"with experts, words of {PER_WORD}), got {kind} of shape {list(words.shape)}",
            path=path,
        )
    parts = np.ascontiguousarray(words, "<i8").view("<i2")
    chosen_TLk, rest = parts[..., : experts.per_token], parts[..., experts.per_token :]
    if (rest != NOT_RECORDED).any():
        raise InvalidInputError(
            f"a token of this model passes {experts.per_token} experts of a layer; the places of "
            "a word beyond them must be -1",
            path=path,
        )
    _check_range(chosen_TLk, experts.count, path)
    return chosen_TLk


def _check_range(chosen_TLk: NDArray[np.int16], count: int, path: str) -> None:
    recorded = chosen_TLk[..., 0] != NOT_RECORDED
    outside = (chosen_TLk < 0) | (chosen_TLk >= count)
    bad = np.where(recorded, outside.any(-1), (chosen_TLk != NOT_RECORDED).any(-1))
    if bad.any():
        token, layer = (int(at) for at in np.argwhere(bad)[0])
        raise InvalidInputError(
            f"token {token}, layer {layer} of those with experts, has experts "
            f"{chosen_TLk[token, layer].tolist()}; they are 0..{count - 1}, or all -1 where the "
            "router is to choose",
            path=path,
        )
    ordered = np.sort(chosen_TLk, axis=-1)
    twice = recorded & (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        token, layer = (int(at) for at in np.argwhere(twice)[0])
        raise InvalidInputError(
            f"token {token}, layer {layer} of those with experts, names an expert twice: "
            f"{chosen_TLk[token, layer].tolist()}",
            path=path,
        )

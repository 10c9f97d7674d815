"""The header of a safetensors file: names and shapes, read without its tensors and without torch.

A header may come from anyone, so its length is judged before it is parsed, and what it names before
an engine sees it: each name costs an engine time in which nobody else has a turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.contract import cost
from tinkex.errors import InvalidInputError

NAME_BYTES = 256
"""Bytes of a header for each name that it may have: its dtype, shape and place besides."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorFile:
    shapes: dict[str, tuple[int, ...]]
    is_whole: bool
    """Whether the file is as long as the header says."""


def read_header(file: Path, max_names: int = cost.FILE.keys) -> TensorFile:
    """Read the header of a safetensors file.

    Raises:
        InvalidInputError: It has more names than `max_names`, or is no such header.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > size - _LENGTH_BYTES:
            raise InvalidInputError(f"{file.name} is cut off within its header, or no safetensors.")
        if length > max_names * NAME_BYTES:
            raise InvalidInputError(
                f"the header of {file.name} has {length} bytes, the limit is "
                f"{max_names * NAME_BYTES}: it names too much for an adapter."
            )
        text = stream.read(length)
    # Counted before it is parsed: every tensor has this key, unless it is spelled with escapes.
    _check_count(file, text.count(b'"data_offsets"'), max_names)
    try:
        header = json.loads(text)
        shapes, ends = {}, [0]
        for name, about in header.items():
            if name != "__metadata__":
                shapes[name] = tuple(map(int, about["shape"]))
                ends.append(int(about["data_offsets"][1]))
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as exc:
        cause = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise InvalidInputError(f"{file.name} has no header of safetensors: {cause}.") from exc
    _check_count(file, len(shapes), max_names)
    return TensorFile(shapes, size == _LENGTH_BYTES + length + max(ends))


def _check_count(file: Path, num_names: int, max_names: int) -> None:
    if num_names > max_names:
        raise InvalidInputError(
            f"{file.name} names {num_names} tensors, the limit is {max_names}; merge the adapter "
            "into its base model, or leave modules out."
        )


def check_adapter(file: Path, config: dict[str, Any]) -> None:
    """Refuse weights of an adapter that are not those its config speaks of.

    Raises:
        InvalidInputError: Says which do not agree.
    """
    header = read_header(file)
    if not header.is_whole:
        raise InvalidInputError(f"{file.name} is cut off, or longer than its header says.")
    patterns = config.get("rank_pattern")
    values = patterns.values() if isinstance(patterns, dict) else ()
    ranks = {config["r"], *(value for value in values if isinstance(value, int))}
    for name, shape in header.shapes.items():
        if 0 in shape:
            raise InvalidInputError(f"{name[:200]!r} in {file.name} is empty: shape {list(shape)}.")
        # Experts that are stacked have a multiple of their rank.
        if ".lora_A." in name and shape and not any(r and shape[0] % r == 0 for r in ranks):
            raise InvalidInputError(
                f"adapter_config.json says r={config['r']!r:.40}, but {name[:200]!r} in "
                f"{file.name} has rank {shape[0]}. Write the rank that the weights have."
            )

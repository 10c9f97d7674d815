"""Rewrite a PEFT folder so that a mixture's experts are stacked: `experts.w1`, `w2`, `w3` in 3-D.

Some servers and tools read experts only in that form. The other modules keep their names, and
importing the folder here gives the same adapter again.
"""

from __future__ import annotations

from pathlib import Path

from tinkex.engine.folders import WEIGHTS
from tinkex.errors import InvalidInputError

__all__ = ["stack_experts"]


def stack_experts(folder: str | Path) -> int:
    """Stack the experts of an adapter's folder, in place; returns how many stacks there are."""
    from safetensors.torch import load_file, save_file

    from tinkex.engine.checkpoint.reader import renew_digest
    from tinkex.engine.lora.foreign_names import stacked

    path = Path(folder) / WEIGHTS
    pairs: dict[str, dict[str, object]] = {}
    for name, tensor in load_file(path).items():
        module, _, rest = name.partition(".lora_")
        pairs.setdefault(module, {})[rest[0]] = tensor
    stacks = stacked(pairs)  # type: ignore[arg-type]
    num_stacks = sum(1 for pair in stacks.values() if pair["A"].ndim == 3)
    if not num_stacks:
        raise InvalidInputError("the checkpoint adapts no experts; export it with --to peft.")
    tensors = {
        f"{module}.lora_{side}.weight": pair[side].contiguous()
        for module, pair in stacks.items()
        for side in "AB"
    }
    save_file(tensors, path, metadata={"format": "pt"})
    renew_digest(folder)  # The manifest holds a digest of the file that was just rewritten.
    return num_stacks

"""Encrypt the files of an exported checkpoint for age recipients, so that only they can read them.

Each file `x` becomes `x.age`; no clear copy stays. Knows folders and recipients, not checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinkex.errors import InvalidInputError

MAX_RECIPIENTS = 10


def check_recipients(recipients: Sequence[str]) -> None:
    """Refuse a list that is empty, too long, or holds anything but age or ssh public keys."""
    if not 1 <= len(recipients) <= MAX_RECIPIENTS:
        raise InvalidInputError(
            f"age_encryption_recipients takes 1 to {MAX_RECIPIENTS} keys, got {len(recipients)}.",
            path="age_encryption_recipients",
        )
    for index, text in enumerate(recipients):
        _parse(text, index)


def encrypt_folder(folder: Path, recipients: Sequence[str]) -> int:
    """Encrypt every file in place; gives the bytes there are now. Blocks; the folder is not listed
    anywhere yet, so nobody reads it half done."""
    import pyrage

    keys = [_parse(text, index) for index, text in enumerate(recipients)]
    size_bytes = 0
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        sealed = file.with_name(file.name + ".age")
        pyrage.encrypt_file(str(file), str(sealed), keys)
        file.unlink()
        size_bytes += sealed.stat().st_size
    return size_bytes


def is_encrypted(folder: Path) -> bool:
    """Whether the files of a folder were encrypted. Blocks."""
    return any(folder.glob("*.age"))


def _parse(text: str, index: int) -> object:
    import pyrage

    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as exc:
        raise InvalidInputError(
            f"{text[:40]!r} is not an age recipient ({exc}). Use the 'age1...' line that "
            "age-keygen prints, or an ssh public key.",
            path=f"age_encryption_recipients[{index}]",
        ) from exc

"""An adapter's files as somebody sent them: a tar unpacked, config, manifests and header read.

All of it runs in the sandbox: these are the bytes of strangers, and a parser of JSON holds the
interpreter from end to end. Knows no server and no engine.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from tinkex.contract.cost import FILE
from tinkex.contract.models import MAX_RANK
from tinkex.engine.folders import CONFIG, DIGEST, MANIFESTS, WEIGHTS
from tinkex.errors import InvalidInputError
from tinkex.server.files.tensor_file import check_adapter, read_header
from tinkex.wire import tar

MAX_CONFIG_BYTES = 1024 * 1024
_STATE_NAMES = 4 * FILE.keys
"""In files of an optimizer or of gradients: some for each matrix of the adapter."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def unpack(archive: BinaryIO, size: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Write the files of a tar of so many bytes into a new folder, and `inspect` them.

    Raises:
        InvalidInputError: The archive or a file in it is not what it must be.
    """
    aside = folder.with_name(f"{folder.name}.tmp")
    aside.mkdir()
    try:
        # Plain tar only: a compressed one could unpack to any size.
        limit = replace(FILE, sent_bytes=size)
        tar.extract(_checked(tar.members(archive, limit)), aside, limit)
        inspected = inspect(aside)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return inspected


def inspect(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Read what the files of an adapter say.

    Returns the adapter's config, and the manifests that named a digest, which are without it now.

    Raises:
        InvalidInputError: The config, a manifest or the header of the weights is wrong.
    """
    config = _read_config(folder / CONFIG)
    claims = [name for name in MANIFESTS if _drop_claim(folder / name)]
    if (weights := folder / WEIGHTS).exists():  # the toy's have another form
        check_adapter(weights, config)
    for file in folder.glob("*.safetensors"):
        read_header(file, _STATE_NAMES)
    return config, claims


def _checked(found: Iterable[tar.Found]) -> Iterator[tar.Found]:
    """Refuse members that an adapter's folder does not have."""
    for member, data in found:
        if member.name and (member.is_folder or not _FILE.fullmatch(member.name)):
            raise InvalidInputError(
                f"the archive holds {member.name[:80]!r}; it may hold plain files without folders, "
                "named by up to 200 letters, digits and any of _ . -, the first of them no . or -. "
                "Use `tinkex import FOLDER`, which leaves others out, or name the files: tar -cf "
                f"a.tar -C FOLDER {CONFIG} {WEIGHTS} (COPYFILE_DISABLE=1 on a Mac)."
            )
        yield member, data


def _read_config(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInputError(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes.")
        config = json.loads(file.read_bytes())
        rank, alpha = config["r"], config.get("lora_alpha", 8)
    except FileNotFoundError:
        raise InvalidInputError(f"the archive holds no {CONFIG}.") from None
    except InvalidInputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        cause = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise InvalidInputError(f"{CONFIG} is not a LoRA config: {cause}.") from exc
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise InvalidInputError(
            f"{CONFIG} has r={rank!r:.80}; a rank is a whole number from 1 to {MAX_RANK}."
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise InvalidInputError(f"{CONFIG} has lora_alpha={alpha!r:.80}; it must be a number.")
    return dict(config)


def _drop_claim(file: Path) -> bool:
    """Take the digest out of a foreign manifest; False where it names none."""
    if not file.exists():
        return False
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidInputError(f"{file.name} has more than {MAX_CONFIG_BYTES} bytes.")
        manifest = json.loads(file.read_bytes())
        if not isinstance(manifest, dict) or DIGEST not in manifest:
            return False
        del manifest[DIGEST]
        file.write_text(json.dumps(manifest, indent=2) + "\n")
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as exc:
        cause = f"{type(exc).__name__}: {str(exc)[:200]}"
        raise InvalidInputError(f"{file.name} is not the JSON of a manifest: {cause}.") from exc
    return True

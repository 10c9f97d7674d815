"""The command that began a run, kept in its log folder for `tinkex train resume`.

A command names files whose code it runs. A log folder may be anybody's, so what is kept is signed
with a secret of this user's state folder: only a command that this user typed is run again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

from tinkex.contract.run_folder import CHECKPOINTS_FILE, COMMAND_FILE
from tinkex.errors import ConfigError
from tinkex.runs import json_lines
from tinkex.wire.local_servers import read_record, state_folder

_SECRET_FILE = "commands.key"
_SIGNATURE = "signature"


def keep(folder: Path, started: dict[str, Any]) -> None:
    """Write how a run was started into its folder; the first command counts."""
    file = folder / COMMAND_FILE
    if not file.exists() or not (folder / CHECKPOINTS_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        signed = {**started, _SIGNATURE: _signature(started)}
        json_lines.write_whole(file, [json.dumps(signed, indent=2), "\n"])


def kept(folder: Path) -> dict[str, Any]:
    """How a run was started: `command`, `params` and `cwd`; empty when its folder does not say.

    Raises:
        ConfigError: This user did not start it so, or with another state folder.
    """
    started = read_record(folder / COMMAND_FILE)
    signature = str(started.pop(_SIGNATURE, ""))
    if started and not hmac.compare_digest(signature.encode(), _signature(started).encode()):
        raise ConfigError(
            f"The command in {folder / COMMAND_FILE} was not typed by you on this machine, and it "
            "may run code of others. Read it; if you trust it, type it yourself with --log-dir "
            f"{folder}, and it goes on from the last checkpoint."
        )
    return started


def _signature(started: dict[str, Any]) -> str:
    text = json.dumps(started, sort_keys=True)
    return hmac.new(_secret(), text.encode(), hashlib.sha256).hexdigest()


def _secret() -> bytes:
    """The secret of this user, made when absent, in a file that they alone can read."""
    file = state_folder() / _SECRET_FILE
    try:
        return file.read_bytes()
    except FileNotFoundError:
        pass
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.getpid()}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(secrets.token_bytes(32))
    try:
        os.link(aside, file)  # whole, and never over that of another process
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    return file.read_bytes()

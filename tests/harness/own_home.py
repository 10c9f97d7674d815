"""A home for the tests: that of the user who runs them, without what Tinkex keeps in it.

Every entry but `.tinkex` and `.tinker` is a link to the user's own; of `.cache` and `.config` only
those below, so that our cache folder and pip serve as ever. What tests leave behind, what a browser
or matplotlib keeps in a home, and what the servers announce that they start, ends with the folder.
Children inherit it, and so do the processes of pytest-xdist.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_OURS = (".tinkex", ".tinker")
_SHARED = {".cache": ("tinkex", "pip", "huggingface"), ".config": ("pip",)}
_USERS = "_HOME_OF_WHO_RUNS_THE_TESTS"


def users_home() -> Path:
    return Path(os.environ[_USERS])


def move_in() -> None:
    """Make it HOME, once for all processes of a test run."""
    os.environ.pop("TINKEX_HOME", None)
    if _USERS in os.environ:
        return
    users = Path.home()
    for name in ("tinkex", "pip"):  # what is fetched outlives the run
        (users / ".cache" / name).mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="tinkex-tests-home-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for entry in users.iterdir():
        if entry.name not in (*_OURS, *_SHARED):
            (home / entry.name).symlink_to(entry)
    for folder, names in _SHARED.items():
        (home / folder).mkdir()
        for entry in (users / folder / name for name in names):
            if entry.exists():
                (home / folder / entry.name).symlink_to(entry)
    os.environ |= {"HOME": str(home), _USERS: str(users)}

"""A home for the tests: that of the user who runs them, without what Tinkex keeps in it.

Every entry but `.tinkex` and `.tinker` is a link to the user's own, so caches and the settings of
pip serve as ever. What tests leave behind, and what the servers announce that they start, ends
with the folder. Children inherit it, and so do the processes of pytest-xdist.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_OURS = (".tinkex", ".tinker")
_USERS = "_HOME_OF_WHO_RUNS_THE_TESTS"


def users_home() -> Path:
    return Path(os.environ[_USERS])


def move_in() -> None:
    """Make it HOME, once for all processes of a test run."""
    os.environ.pop("TINKEX_HOME", None)
    if _USERS in os.environ:
        return
    users = Path.home()
    (users / ".cache").mkdir(parents=True, exist_ok=True)  # what is fetched outlives the run
    home = Path(tempfile.mkdtemp(prefix="tinkex-tests-home-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for entry in users.iterdir():
        if entry.name not in _OURS:
            (home / entry.name).symlink_to(entry)
    os.environ |= {"HOME": str(home), _USERS: str(users)}

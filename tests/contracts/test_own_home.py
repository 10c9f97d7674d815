"""No test writes to the home of the user who runs it (`harness/own_home.py`)."""

import os
import subprocess
import sys
from pathlib import Path

from own_home import users_home

from tinkex.client.credentials import credentials_path
from tinkex.wire.local_servers import state_folder


def test_what_tinkex_keeps_lies_in_a_home_of_the_tests() -> None:
    for place in (state_folder(), credentials_path().parent):
        assert place.parent == Path.home()
        assert not place.is_symlink()
    assert Path.home() != users_home()


def test_children_without_our_variables_live_there_too() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("TINKE")}
    program = "from tinkex.wire.local_servers import state_folder; print(state_folder())"
    said = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == str(Path.home() / ".tinkex")


def test_our_cache_folder_and_pips_are_the_users() -> None:
    for name in ("tinkex", "pip"):
        ours, theirs = (home / ".cache" / name for home in (Path.home(), users_home()))
        assert ours.resolve() == theirs.resolve()


def test_what_other_programs_keep_in_a_home_ends_with_the_tests() -> None:
    for name in (".cache", ".config"):
        assert (Path.home() / name).resolve() == Path.home().resolve() / name

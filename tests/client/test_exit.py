"""The end of a program: the background loop ends before the interpreter does."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# The handler registered first runs last: after it, nothing of ours runs any more.
PROGRAM = """
import atexit, sys, threading

def after_all():
    names = [thread.name for thread in threading.enumerate()]
    print("after", "tinkex" in names)
    try:
        background().submit(print)
    except Exception as exc:
        print(type(exc).__name__, exc)

atexit.register(after_all)

import tinkex
from tinkex.client.background_loop import background

def mine():
    answered = threading.Event()
    background().submit(answered.set)
    print("before", answered.wait(60))

atexit.register(mine)

def for_ever():
    loop.call_soon(for_ever)

loop = background().loop
background().submit(for_ever)
print("running", "tinkex" in [thread.name for thread in threading.enumerate()])
"""


def run() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=500, check=False
    )


def test_exit_handlers_can_still_send_and_then_the_loop_ends():
    """A callback of uvloop in a dead interpreter would be a segmentation fault."""
    done = run()
    assert done.returncode == 0, done.stderr
    running, before, after, refused = done.stdout.splitlines()
    assert (running, before, after) == ("running True", "before True", "after False")
    assert refused.startswith("ClientClosedError The program is ending")
    assert done.stderr == ""


# A C exit handler keeps the process for a second after its interpreter is gone, as the destructors
# of torch do for a while; meanwhile a timer of the loop comes due.
LATE = """
import ctypes, sys, time
import tinkex
from tinkex.client.background_loop import background

libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
loop = background().loop
background().submit(lambda: loop.call_later(0.7, print))
time.sleep(0.2)
sys.exit(1)  # what `sleep` is told
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="on_exit is glibc's")
def test_a_timer_that_comes_due_after_the_interpreter_does_not_crash():
    done = subprocess.run([sys.executable, "-c", LATE], timeout=500, check=False)
    assert done.returncode == 1

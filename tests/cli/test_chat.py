"""Chat on a terminal: banner, commands, history, and Ctrl-C that stops an answer only."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import httpx
import pytest
from patience import until

WAIT_S = 180
OPEN = r"^tinkex_user_open_requests\{.*\} [1-9]"


class Terminal:
    """`tinkex ARGS` behind a pseudo terminal."""

    def __init__(self, home, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {k: v for k, v in os.environ.items() if not k.startswith("TINKE")}
        env |= {"TINKEX_HOME": str(home), "HOME": str(home), "TERM": "xterm"}
        env["TINKEX_CACHE"] = os.environ.get("TINKEX_CACHE") or os.path.expanduser(
            "~/.cache/tinkex"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tinkex.cli", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.shown = ""
        self._ahead = ""

    def until(self, text: str, *, typing: str = "") -> str:
        """Wait for a text; gives what came up to its end, and leaves the rest for the next.

        `typing` is typed again every half second: CPython loses a Ctrl-C that comes between the
        prompt and the reading of the line, and a person presses it once more.
        """
        deadline, seen = time.monotonic() + WAIT_S, self._ahead
        while text not in seen:
            assert time.monotonic() < deadline, f"no {text!r} in {seen!r}; before: {self.shown!r}"
            self.type(typing)
            if select.select([self._ours], [], [], 0.5)[0]:
                try:
                    seen += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    assert text in seen, f"ended; no {text!r} in {seen!r}"
        seen, _, self._ahead = seen.partition(text)
        self.shown += seen + text
        return seen + text

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self._ours, 4096):
                pass
        return self.process.wait(WAIT_S)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches who owns the terminal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it


@pytest.fixture
def chat(tmp_path, toy_server):
    opened = []

    def start(*args: str) -> Terminal:
        opened.append(Terminal(tmp_path, "--base-url", toy_server, "chat", *args))
        return opened[-1]

    yield start
    for terminal in opened:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


@pytest.mark.usefixtures("default_model_dir")
def test_a_conversation_with_banner_commands_and_history(chat, tmp_path, saved):
    terminal = chat(saved.sampler_path, "--max-tokens", "4", "--seed", "1")
    banner = terminal.until("you> ")
    assert saved.sampler_path in banner
    assert "base model" in banner
    assert "/help" in banner
    terminal.type("/help\n")
    assert "/compare" in terminal.until("you> ")
    terminal.type("/system Talk like a pirate.\n")
    assert "System message set" in terminal.until("you> ")
    terminal.type("Hello there\n")
    terminal.until("you> ")
    terminal.type("/compare\n")
    assert "answers too" in terminal.until("you> ")
    terminal.type("And you?\n")
    both = terminal.until("you> ")
    assert both.count("> ") >= 3, "two labelled answers and the next prompt"
    terminal.type(f"/save {tmp_path}/talk.jsonl\n")
    assert "Added to" in terminal.until("you> ")
    terminal.type("/nonsense\n")
    assert "no command /nonsense" in terminal.until("you> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    (row,) = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    history = (tmp_path / "chat_history").read_text()
    assert "Hello there" in history
    again = chat("--max-tokens", "4")
    again.until("you> ")
    again.type("\x1b[A")  # the arrow that goes back in history
    again.until("/nonsense")
    again.type("\x15/exit\n")
    assert again.end() == 0


@pytest.mark.usefixtures("default_model_dir")
def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path, start_server):
    folder = tmp_path / "server"
    folder.mkdir()
    with start_server(folder, "--engine", "toy:token_latency_s=600") as base_url:
        terminal = Terminal(tmp_path, "--base-url", base_url, "chat", "--max-tokens", "30000")
        terminal.until("you> ")
        terminal.type("Count to a million\n")
        terminal.until("million\r\n")
        # The answer is asked for when its sample is there; its first token takes ten minutes.
        until(lambda: re.search(OPEN, httpx.get(f"{base_url}/metrics").text, re.MULTILINE))
        terminal.type("\x03")
        terminal.until("(stopped)")
        terminal.until("you> ")
        terminal.until("Ctrl-D or /exit ends", typing="\x03")
        terminal.until("you> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0

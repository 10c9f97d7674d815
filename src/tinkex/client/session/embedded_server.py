"""The embedded server: `tinkex.server` as a private child on a loopback port.

The first client of a user starts it, the next ones join it, and it ends by itself when the last one
is gone (the server watches the process ids of its clients). It loads whatever base model is asked
for, and its data lies in a folder of its own, apart from that of `tinkex serve`. A file in the
state folder says where it listens; a lock beside it keeps two clients from starting two. Whichever
client first finds the server dead starts it again on the same port: its journal brings every
session and run back, so all of them go on. Where the user runs `tinkex serve` with the wanted model
and without keys, that one is joined instead. The server code runs only in the child: this module
knows a command line, the files of `wire/local_servers.py` and three URLs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx

from tinkex.contract.models import DEFAULT_MODEL
from tinkex.errors import LocalServerError, how_to_install
from tinkex.types.service.extensions import ProcessRequest
from tinkex.wire import requests
from tinkex.wire.endpoints import ENDPOINTS
from tinkex.wire.local_servers import (
    keeper_of,
    living_servers,
    private_data_folder,
    private_kind,
    read_record,
    state_folder,
    write_record,
)
from tinkex.wire.loopback import DIRECT

logger = logging.getLogger("tinkex.local")

START_TIMEOUT_S = 120.0
IDLE_S = 10.0
STATE_TTL_S = 86_400.0
"""How long the private server keeps the state of a run whose program ended without closing it."""
KEY_FILE = "local.key"
LOCAL_USER = "local"
"""Who the key acts for."""
MAX_RESTARTS = 3
"""Times within `RESTART_WINDOW_S` that a server which died is started again."""
RESTART_WINDOW_S = 600.0
_NUM_LAST_WORDS = 12
_NOT_FOR_THE_SERVER = ("TINKEX_CLIENT_", "TINKEX_API_KEY", "TINKEX_BASE_URL", "TINKEX_LOCAL_")


# Clients of this process per server: the server counts processes, not clients.
_users: Counter[str] = Counter()
_users_lock = threading.Lock()
# Servers this process started: kept so that an ended one is reaped, not left as a zombie.
_children: list[subprocess.Popen[bytes]] = []


@atexit.register
def _part_from_children() -> None:
    """They end by themselves, soon after this process; `Popen` would warn that they still run."""
    for child in _children:
        if child.poll() is None:
            child.returncode = 0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running embedded server that this process is a client of."""

    base_url: str
    api_key: str = field(repr=False)
    """The server's own key, which only this user of the machine can read."""
    env: Mapping[str, str] = field(repr=False)
    """What it was started with, and is started again with."""
    model: str | None = None
    is_private: bool = True
    """Started by us and ended with its last client; False for a `tinkex serve` that we joined."""
    has_private_data: bool = True
    """Its runs are those of the private server: it has that one's data folder."""

    def revive(self) -> None:
        """Start the server again where it listened, on its data, unless it answers. Blocks.

        Raises:
            LocalServerError: It does not start, or died too often lately.
        """
        if not self.is_private:
            if _answers(self.base_url, self.api_key):
                return
            raise LocalServerError(
                f"Your server at {self.base_url} is gone. Start it again with `tinkex serve`, and "
                "what it accepted goes on; or make a new ServiceClient for a private server."
            )
        private = _PrivateServer(self.env, self.model)
        with private.locked():
            known = private.running(self.api_key)
            if known is None:
                private.count_restart()
                known = private.start(urlsplit(self.base_url).port or 0, is_again=True)
            if known != self.base_url:
                raise LocalServerError(
                    f"The embedded server at {self.base_url} is gone, and another one runs at "
                    f"{known}. Make a new ServiceClient."
                )

    async def leave(self) -> None:
        """Say that this process is done with it, once its last client here has left.

        Failing to say so is harmless: the server notices when the process ends.
        """
        with _users_lock:
            _users[self.base_url] -= 1
            if _users[self.base_url] > 0:
                return
        with contextlib.suppress(httpx.HTTPError):
            headers = {"x-api-key": self.api_key}
            async with httpx.AsyncClient(headers=headers, **_how(self.base_url)) as client:
                await client.post(**_process_call(self.base_url, "detach"))


def join_local_server(
    env: Mapping[str, str] | None = None, model: str | None = None, *, is_private: bool = False
) -> LocalServer:
    """Join a server of the user on this machine, starting one when none fits. Blocks.

    A private one that runs already comes first, then a `tinkex serve` that has its data folder,
    then one without keys that has `model` (None: the default model), unless `is_private` rules that
    out. `TINKEX_LOCAL_ENGINE=toy` chooses what a new one computes with.

    Raises:
        LocalServerError: The server did not start; the message ends with its last words. Or another
            one has its data folder, and does not have the model or wants a key.
    """
    env = dict(os.environ if env is None else env)
    private = _PrivateServer(env, model)
    with private.locked():
        key = private.key()
        base_url, keeper, serving = private.running(key), None, None
        if base_url is None:
            keeper = _keeper(env, model, key)
        if base_url is None and keeper is None and not is_private:
            serving = _serving(env, model, key)
        base_url = base_url or keeper or serving
        if base_url is None:
            try:
                base_url = private.start(private.last_port())
            except LocalServerError:
                # A `tinkex serve` that was just starting may have the folder now.
                base_url = keeper = _keeper(env, model, key)
                if base_url is None:
                    raise
    with _users_lock:
        _users[base_url] += 1
    return LocalServer(
        base_url,
        key,
        env,
        model,
        is_private=keeper is None and serving is None,
        has_private_data=serving is None,
    )


def _keeper(env: Mapping[str, str], model: str | None, key: str) -> str | None:
    """The address of a `tinkex serve` that has the private server's data folder."""
    record = keeper_of(private_data_folder(env), env)
    if not record:
        return None
    base_url, models = str(record.get("base_url")), record.get("models", ())
    about = f"your server at {base_url} (`tinkex serve`, process {record.get('pid')})"
    if record.get("needs_key"):
        raise LocalServerError(
            f"The runs of this machine are on {about}, which wants a key: name it with "
            f"TINKER_BASE_URL={base_url} and give TINKER_API_KEY."
        )
    if model is not None and record.get("engine") == "torch" and model not in models:
        raise LocalServerError(
            f"The runs of this machine are on {about}, which does not have {model!r}. Start it "
            f"with --model {model} as well, or with a --data-dir of its own."
        )
    if not _answers(base_url, key):
        return None
    logger.info("Using %s, which has the runs of this machine.", about)
    return base_url


def _serving(env: Mapping[str, str], model: str | None, key: str) -> str | None:
    """The address of a `tinkex serve` of this user that would do; says so when it is used."""
    wanted = model or DEFAULT_MODEL
    for record in living_servers(env):
        fits = (
            record.get("engine") == (env.get("TINKEX_LOCAL_ENGINE") or "torch")
            and record.get("needs_key") is False
            and wanted in record.get("models", ())
        )
        base_url = str(record.get("base_url", ""))
        if fits and _answers(base_url, key):
            logger.warning(
                "Using your server at %s (`tinkex serve`, process %s), which has %s.",
                base_url,
                record.get("pid"),
                wanted,
            )
            return base_url
    return None


class _PrivateServer:
    """The private server of a user, one for each kind of engine: its files, and how it is started.

    Everything blocks. What looks and then acts does so while it is `locked`.
    """

    def __init__(self, env: Mapping[str, str], model: str | None) -> None:
        self._env = env
        self._model = model
        self.folder = state_folder(env)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key_file = self.folder / KEY_FILE
        self._record = self.folder / f"{private_kind(env)}.json"
        """Says where it listens."""
        self._log = self.folder / "local-server.log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with (self.folder / "local.lock").open("a+b") as file:
            if os.name == "posix":
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def key(self) -> str:
        """Its key, in a file that its user alone can read. Made when absent."""
        file = self._key_file
        with contextlib.suppress(FileNotFoundError):
            key = file.read_text("utf-8").strip().partition("=")[0]
            if key.startswith("tml-"):
                if os.name == "posix" and file.stat().st_mode & 0o077:
                    file.chmod(0o600)
                return key
        key = f"tml-{secrets.token_urlsafe(32)}"
        aside = file.with_suffix(f".{os.getpid()}")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{key}={LOCAL_USER}\n")
        os.replace(aside, file)
        return key

    def running(self, key: str) -> str | None:
        """Its base URL, if it lives and takes us in."""
        base_url = str(read_record(self._record).get("base_url", ""))
        if not _answers(base_url, key):
            return None
        logger.info("Using the private server of this machine: %s", base_url)
        return base_url

    def last_port(self) -> int:
        """Where the last one listened, so that clients who still wait for it find the next one."""
        try:
            port = urlsplit(str(read_record(self._record).get("base_url"))).port or 0
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except (OSError, ValueError):
            return 0
        return port

    def count_restart(self) -> None:
        """Note that it is started again; refuse when that happened too often lately."""
        known, now = read_record(self._record), time.time()
        recent = [at for at in known.get("restarts", []) if now - at < RESTART_WINDOW_S]
        if len(recent) >= MAX_RESTARTS:
            raise LocalServerError(
                f"The embedded server died {len(recent) + 1} times within "
                f"{RESTART_WINDOW_S / 60:.0f} minutes and is not started again. Its data is safe: "
                f"find out why it dies, then run the program again. {self._last_words()}"
            )
        self._note(restarts=[*recent, now])

    def start(self, port: int, *, is_again: bool = False) -> str:
        """Start it and wait until it answers; gives its base URL."""
        _check_installed()
        if is_again:
            text = "The server on this machine is gone (log: %s); starting it again."
        else:
            text = (
                "Starting a private server on this machine, since no other is named (log: %s). For "
                "the hosted service set TINKER_API_KEY."
            )
        logger.warning(text, self._log)
        started = time.monotonic()
        with self._log.open("ab") as log:
            before = log.seek(0, os.SEEK_END)
            child = subprocess.Popen(
                self._command(port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_server_env(self._env),
                start_new_session=True,  # Ctrl-C in a notebook must not stop a shared server
            )
        base_url = self._announced(child, started, before)
        _children[:] = [*(other for other in _children if other.poll() is None), child]
        self._note(base_url=base_url, pid=child.pid)
        try:
            _attach(base_url, self.key())
        except (OSError, httpx.HTTPError) as exc:
            raise LocalServerError(
                f"The private server started at {base_url} and does not take us in: {exc}. "
                f"{self._last_words(before)}"
            ) from exc
        logger.info("The server listens on %s after %.1f s.", base_url, time.monotonic() - started)
        return base_url

    def _command(self, port: int) -> list[str]:
        command = [sys.executable, "-m", "tinkex.server", "--port", str(port)]
        command += ["--until-idle", str(IDLE_S), "--api-key-file", str(self._key_file)]
        command += [
            "--parent-pid",
            str(os.getpid()),
            "--data-dir",
            str(private_data_folder(self._env)),
        ]
        if engine := self._env.get("TINKEX_LOCAL_ENGINE"):
            command += ["--engine", engine]
        if self._model:
            command += ["--model", self._model]
        return command

    def _announced(self, child: subprocess.Popen[bytes], started: float, before: int) -> str:
        """The base URL, from the JSON line that the server prints once it answers."""
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while time.monotonic() - started < START_TIMEOUT_S:
                if selector.select(timeout=0.5) or child.poll() is not None:
                    break
        line = child.stdout.readline() if child.poll() is None or child.stdout.readable() else b""
        try:
            return str(json.loads(line)["base_url"])
        except (ValueError, KeyError, TypeError):
            # Its output closes a moment before its end can be seen.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0 if time.monotonic() - started >= START_TIMEOUT_S else 5)
            ended = child.poll() is not None
            child.kill()
            child.wait()
            how = "ended at once" if ended else f"did not start within {START_TIMEOUT_S:.0f} s"
            raise LocalServerError(
                f"The embedded server {how}. {self._last_words(before)}"
            ) from None
        finally:
            child.stdout.close()

    def _last_words(self, since: int | None = None) -> str:
        """The end of its log from byte `since` on; from the last error on, when that has one."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self._log.read_bytes()[since or 0 :].decode("utf-8", "replace").splitlines()
        lines = lines[-_NUM_LAST_WORDS:]
        errors = [index for index, line in enumerate(lines) if line.startswith("Error: ")]
        if since is not None and errors:
            lines = lines[errors[-1] :]
        return "\n".join([f"Its last words ({self._log}):", *lines])

    def _note(self, **facts: Any) -> None:
        write_record(self._record, {**read_record(self._record), **facts})


def _answers(base_url: str, key: str) -> bool:
    try:
        _attach(base_url, key)
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


def _attach(base_url: str, key: str) -> None:
    with httpx.Client(headers={"x-api-key": key}, **_how(base_url)) as client:
        client.post(**_process_call(base_url, "attach")).raise_for_status()


def _how(base_url: str) -> dict[str, Any]:
    """The arguments of a client of httpx: without TLS, no certificates are read."""
    return {"timeout": 5, "mounts": DIRECT, "verify": base_url.startswith("https")}


def _process_call(base_url: str, endpoint: str) -> dict[str, Any]:
    """The arguments of httpx for a call that tells the server of this process."""
    body = requests.encode(endpoint, ProcessRequest(pid=os.getpid()))
    url = f"{base_url}{ENDPOINTS[endpoint].path}"
    return {"url": url, "content": body.content, "headers": body.headers}


def _server_env(env: Mapping[str, str]) -> dict[str, str]:
    """Settings of clients are not for the server. A run whose program is gone stays for a day."""
    kept = {k: v for k, v in env.items() if not k.startswith(_NOT_FOR_THE_SERVER)}
    if "TINKEX_STATE_TTL_S" not in env:
        kept.setdefault("TINKEX_SERVER_STATE_TTL_S", str(STATE_TTL_S))
    return kept


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "sqlalchemy") if find_spec(name) is None]
    if missing:
        raise LocalServerError(
            f"The private server needs {', '.join(missing)}, and only the SDK is installed: "
            f"{how_to_install('local')}. Or name a server: base_url=, or api_key= for the hosted."
        )

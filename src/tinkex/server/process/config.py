"""Every setting of the server, in one value.

Defaults come first, then a TOML file, then `TINKEX_*` environment variables, then flags: the later
one wins, and a key nobody knows is an error wherever it stands. This module knows how settings are
read and which combinations are refused. It does not know what they do.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinkex.engine.registry.engines import EngineKind, engine_kind
from tinkex.errors import ConfigError
from tinkex.server.process.default_folder import default_data_dir
from tinkex.wire.local_servers import state_folder

ENV_PREFIX = "TINKEX_"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
MAX_WORKERS = 256
MAX_GROUP = 16
_SECRET_FIELDS = frozenset({"api_keys", "database"})

# Limits of one user (max_user_...) may be 0 besides, which means none.
_MAY_BE_ZERO = frozenset(
    {
        "port",
        "num_workers",
        "all_reduce_timeout_s",
        "parent_pid",
        "min_free_bytes",
        "max_unnamed_samplers",
        "until_idle_s",
        "result_grace_s",
    }
)


def _checked_url(url: str) -> str:
    """An address without a slash at its end.

    Raises:
        ConfigError: It is not one that a server is reached at.
    """
    try:
        parts = urlsplit(url.rstrip("/"))
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or parts.path or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"public_url must be like https://tinkex.example.org or http://host:8765, got {url!r}."
        )
    return url.rstrip("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on. Any address but loopback needs a key, given here or stored."""
    port: int = 8765
    """Port to listen on; 0 picks a free one and prints it."""
    models: tuple[str, ...] = ()
    """Base models to serve: names or local folders. Empty: the default model of the engine."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names under which a served model answers."""
    data_dir: Path = field(default_factory=lambda: state_folder() / "server")
    """Where the database, checkpoints and recovery snapshots live. Not given, without keys and with
    the default model: the private server's, unless `~/.tinkex/server` has a database."""
    api_keys: tuple[str, ...] = ()
    """`KEY` or `KEY=USER`, beside those of `tinkex keys`. None at all: all are the user `local`."""
    api_key_file: str = ""
    """File with such entries, one a line: unlike a flag it is not in the list of processes."""
    key_required: bool = False
    """Refuse callers without a key on loopback too, as behind a proxy."""
    public_url: str = ""
    """The address that clients use, as behind a proxy: links are made with it, and requests to
    other names refused. Empty: the name that a request came to."""
    tls_cert: str = ""
    """PEM file with the certificate and its chain; with `tls_key`, the server speaks HTTPS."""
    tls_key: str = ""
    """PEM file with the certificate's private key, unencrypted."""
    database: str = ""
    """SQLAlchemy URL; empty means SQLite in `data_dir`."""
    storage: str = ""
    """`s3://BUCKET/PREFIX` keeps checkpoints in an object store; empty: in `data_dir`."""
    storage_cache_bytes: int = 50 * 1024**3
    """Copies of checkpoints in `data_dir` when `storage` is set; those not used lately go first."""
    power_safe: bool = True
    """Promises survive a power cut, for an fsync each. Off: they survive every crash but that."""
    engine: str = "torch"
    """`torch` computes; `toy` is a stand-in for tests, its settings behind a colon."""
    any_base: bool = False
    """Use checkpoints on other base weights than they were trained on, with a warning."""
    deterministic: bool = False
    """Same requests, same bits, replay after a crash included; slower."""
    devices: tuple[str, ...] = ("auto",)
    """One worker process per entry: `auto`, `cpu`, `cuda:0`, ..."""
    num_workers: int = 0
    """Worker processes that share the work; 0 means one a device. `auto` is a GPU for each."""
    group_size: int = 1
    """Devices that hold a base model together, as one worker; for models larger than one device."""
    group_timeout_s: float = 120.0
    """A group is started again when a member keeps the others waiting for longer."""
    all_reduce_timeout_s: float = 30.0
    """Workers that share a run wait for each other's gradients so long; 0: none share a run."""
    ray: str = ""
    """`auto` or `HOST:PORT` of a Ray cluster: workers run on its nodes, one a GPU."""
    access_log: bool = False
    """Log every request as a line of JSON: id, user, route, status and seconds."""
    log_format: str = "text"
    """`text`, or `json`: an object a line, with the id of the request it belongs to."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`; the log goes to stderr."""
    debug: bool = False
    """Log the stack of whatever holds the event loop for a tenth of a second; a little slower."""

    until_idle_s: float = 0.0
    """End the server once no client was seen for this many seconds; 0 means never."""
    parent_pid: int = 0
    """A process that counts as a client of this server while it lives; 0 means none."""

    stop_grace_s: float = 5.0
    """How long requests that are being answered may take when the server is told to stop."""
    hold_s: float = 30.0
    """How long a poll for a result is held before it is answered with 408."""
    metadata_only_bytes: int = 1_000_000
    """Results larger than this announce their size before they are sent, if the client can."""
    result_ttl_s: float = 86_400.0
    """How long a result waits to be fetched."""
    result_grace_s: float = 60.0
    """How long a fetched result is kept, in case the answer was lost on the way."""
    gap_limit_s: float = 330.0
    """How long later requests of a model wait for a missing seq_id. Clients retry for 300 s."""
    park_after_s: float = 300.0
    """A session without a heartbeat for this long gives its memory back; its state stays."""
    state_ttl_s: float = 14 * 86_400.0
    """How long a model's state outlives the last sign of life of its session; checkpoints stay."""
    closed_state_ttl_s: float = 3600.0
    """How long it outlives a session that its client closed; nobody can train on there."""
    audit_ttl_s: float = 365 * 86_400.0
    """How long entries of the audit log are kept."""
    session_ttl_s: float = 90 * 86_400.0
    """How long a session without a run is kept after its last sign of life."""
    journal_ttl_s: float = 7 * 86_400.0
    """How long the journal remembers a request that ended; a repeat finds it until then."""
    quarantine_ttl_s: float = 30 * 86_400.0
    """How long a folder of `data_dir` that no row knows is kept in `quarantine/`."""
    snapshot_every_ops: int = 256
    """State-changing requests of a model between two recovery snapshots."""
    snapshot_every_s: float = 60.0
    """Seconds of compute of a model between two recovery snapshots."""

    max_queued_samples: int = 20_000
    """Samples that may wait; more are answered with 429."""
    max_kept_result_bytes: int = 256 * 1024 * 1024
    """Unfetched sample results in memory, a quarter of it for one user; more go to disk."""
    max_user_result_bytes: int = 1024 * 1024 * 1024
    """Unfetched sample results of one user; beyond it new samples are answered with 429."""
    max_user_queued: int = 0
    """Training requests and samples of one user that wait or run; 0 means no limit."""
    max_user_running: int = 0
    """Those of them that workers hold at a time; others wait. 0 means no limit."""
    max_unnamed_samplers: int = 16
    """Unnamed weights to sample from that a run keeps on disk: those that were used last. 0: all,
    until its session ends."""
    max_sample_bytes: int = 64 * 1024 * 1024
    """Largest result one sample request may ask for: num_samples x max_tokens x topk."""
    max_running_samples: int = 512
    """Sample requests one worker holds at a time."""
    max_running_training: int = 16
    """Training requests one worker holds at a time."""
    max_body_bytes: int = 256 * 1024 * 1024
    """Largest request body, before and after decompression; small routes take far less."""
    max_upload_bytes: int = 8 * 1024 * 1024 * 1024
    """Largest file of an upload of weights, which is written to the disk as it comes."""
    max_held_body_bytes: int = 384 * 1024 * 1024
    """Bytes of request bodies and answers in memory at a time; half of it for one user. Others
    wait. What JSON becomes once parsed has a budget of the same size."""
    max_connections_per_address: int = 2048
    """Open connections of one address; behind a proxy that is the proxy's. More are closed."""
    head_timeout_s: float = 20.0
    """How long a connection may take to say what it wants."""
    body_pause_s: float = 30.0
    """How long the sender of a body may pause."""
    min_free_bytes: int = 64 * 1024 * 1024
    """New work is refused (507) while `data_dir` has less room, so that accepted work can end."""
    max_user_disk_bytes: int = 0
    """Bytes one user may keep on the disk, of all that `tinkex disk` lists; 0 means no limit."""
    max_user_sessions: int = 10_000
    """Sessions of one user that are alive; 0 means no limit."""
    max_user_models: int = 10_000
    """Models of one user whose state is kept; 0 means no limit."""
    max_user_requests_per_minute: float = 0.0
    """Requests one user may make a minute, a sixth of that at once; 0 means no limit."""
    prices: tuple[str, ...] = ()
    """`[MODEL:]KIND=PRICE` of a million tokens, for budgets of money and estimates."""
    keep_rollouts: bool = False
    """Keep sampled answers in memory for the console, of users who agree to it there. A server that
    needs no key keeps those of its user without being asked."""
    rollout_ttl_s: float = 86_400.0
    """How long such an answer is kept."""
    max_rollout_bytes: int = 64 * 1024 * 1024
    """Bytes of such answers; beyond it the oldest of who has most go first."""
    worker_start_timeout_s: float = 300.0
    """How long a worker may take to start before it is called broken."""
    stuck_after_s: float = 300.0
    """A worker without progress for this long, plus 0.02 s per token, is started again."""

    @property
    def engine_kind(self) -> EngineKind:
        return engine_kind(self.engine)

    @property
    def worker_devices(self) -> list[str]:
        """The device of each worker, or the devices of its group with a plus between them."""
        size, devices = self.group_size, list(self.devices)
        total = max(1, self.num_workers) * size
        if self._shares_device and total > 1:
            is_auto = devices[0] == "auto"
            devices = [f"auto:{i}" if is_auto else devices[0] for i in range(total)]
        return ["+".join(devices[at : at + size]) for at in range(0, len(devices), size)]

    @property
    def _shares_device(self) -> bool:
        """Whether the one entry of `devices` stands for as many as are needed."""
        return len(self.devices) == 1 and self.devices[0] in ("auto", "cpu")

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_dir", Path(self.data_dir).expanduser())
        kind = self.engine_kind  # refuses an engine or settings that there are not
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}.")
        self._check_amounts()
        self._check_names(kind)
        if bool(self.tls_cert) != bool(self.tls_key):
            present, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ConfigError(f"{present} is set and {missing} is not; HTTPS needs both.")

    def require_key(self, *, is_any_stored: bool) -> None:
        """Refuse to let everybody in: another address than loopback needs a key.

        Raises:
            ConfigError: There is none, neither here nor in the store (`tinkex keys add`).
        """
        if not (self.is_loopback or self.api_keys or is_any_stored):
            folder = f"--data-dir {shlex.quote(str(self.data_dir))}"
            where = "--database URL" if self.database else folder
            raise ConfigError(
                f"host {self.host!r} is reachable by others and no api key is set. Make one with "
                f"`tinkex keys add --user NAME {where}`, give --api-key KEY=USER, or "
                "listen on 127.0.0.1."
            )

    def _check_amounts(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            may_be_zero = spec.name in _MAY_BE_ZERO or spec.name.startswith("max_user_")
            if value < 0 or (value == 0 and not may_be_zero):
                raise ConfigError(f"{spec.name} must be positive, got {value}.")

    def _check_names(self, kind: EngineKind) -> None:
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                f"log_level must be debug, info, warning or error, got {self.log_level!r}."
            )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be text or json, got {self.log_format!r}.")
        if not self.devices:
            raise ConfigError("devices is empty; use ('auto',) for one worker.")
        named = tuple(device.strip() for entry in self.devices for device in entry.split(","))
        object.__setattr__(self, "devices", named)
        for device in named if kind.uses_devices else ():
            if not _DEVICE.fullmatch(device):
                raise ConfigError(
                    f"device {device!r} cannot be used: only CUDA cards and CPUs are supported. "
                    "Use auto, cpu (on an Apple machine too), cuda or cuda:N."
                )
        if self.num_workers > MAX_WORKERS:
            raise ConfigError(f"num_workers must be at most {MAX_WORKERS}, got {self.num_workers}.")
        if self.ray and named not in (("auto",), ("cpu",)):
            raise ConfigError(
                f"devices is {', '.join(named)}, and ray chooses devices by itself. Leave devices "
                "out, or give cpu."
            )
        self._check_groups(kind)
        num_named = len(named) // self.group_size
        if self.num_workers not in (0, num_named) and not self._shares_device:
            each = "one device" if self.group_size == 1 else f"{self.group_size} devices"
            raise ConfigError(
                f"num_workers is {self.num_workers}, but devices names {len(named)}: "
                f"{', '.join(named)}. Name {each} a worker, or leave num_workers out."
            )
        if self.public_url:
            object.__setattr__(self, "public_url", _checked_url(self.public_url))
        for name, target in self.aliases.items():
            if not name or not target:
                raise ConfigError(f"alias {name!r}={target!r} needs a name and a model.")
        if self.api_key_file:
            object.__setattr__(self, "api_keys", (*self.api_keys, *_read_keys(self.api_key_file)))
            object.__setattr__(self, "api_key_file", "")  # read once
        for entry in self.api_keys:
            if not entry.split("=", 1)[0].startswith("tml-"):
                raise ConfigError(
                    "an api key must start with 'tml-', because clients refuse others; "
                    f"got one that starts with {entry[:4]!r}."
                )

    def _check_groups(self, kind: EngineKind) -> None:
        size, named = self.group_size, self.devices
        if size == 1:
            return
        if size > MAX_GROUP:
            raise ConfigError(f"group_size must be at most {MAX_GROUP}, got {size}.")
        if not kind.uses_devices:
            raise ConfigError(
                f"group_size is {size}, but the {kind.name} engine has no model to divide: a group "
                "is for an engine that computes on devices. Leave group_size out."
            )
        if self._shares_device:
            return
        if len(named) % size or len(set(named)) < len(named):
            raise ConfigError(
                f"devices names {len(named)}: {', '.join(named)}. Groups of {size} need {size} "
                "different ones each, such as "
                f"--device {','.join(f'cuda:{i}' for i in range(size))}; or give auto."
            )
        if len({device.partition(":")[0] for device in named}) > 1:
            raise ConfigError(
                f"devices names {', '.join(named)}: the members of a group are all of one kind."
            )

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def describe(self) -> dict[str, Any]:
        """The effective settings as plain values, secrets masked."""
        shown: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            shown[spec.name] = _mask(spec.name, value) if spec.name in _SECRET_FIELDS else value
        shown["data_dir"] = str(self.data_dir)
        shown["aliases"] = dict(self.aliases)
        return shown

    def changed(self) -> dict[str, Any]:
        """Settings that are not as by default, secrets masked."""
        default = ServerConfig().describe()
        return {name: value for name, value in self.describe().items() if value != default[name]}


def _read_keys(name: str) -> list[str]:
    """The entries of a key file; empty lines and those that start with # do not count."""
    file = Path(name).expanduser()
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        readers = file.stat().st_mode & 0o077
    except OSError as exc:
        raise ConfigError(f"cannot read the key file {file}: {exc.strerror}.") from exc
    if readers and os.name == "posix":
        raise ConfigError(
            f"the key file {file} can be read by others on this machine. Run chmod 600 {file}."
        )
    return [line for line in lines if line and not line.startswith("#")]


def _mask(name: str, value: Any) -> Any:
    if name == "api_keys":
        return [f"tml-***={user or 'default'}" for _, _, user in (k.partition("=") for k in value)]
    if "@" in value:  # scheme://user:password@host/name
        scheme, _, rest = value.partition("://")
        return f"{scheme}://***@{rest.rsplit('@', 1)[1]}"
    return value


def load_config(
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> ServerConfig:
    """Read settings from a file, the environment and flags, the later winning.

    Args:
        file: A TOML file; when None, `$TINKEX_CONFIG` names it, if set.
        env: The environment; when None, that of the process.
        flags: Settings given on the command line; None values count as not given.
    """
    env = os.environ if env is None else env
    if file is None and env.get("TINKEX_CONFIG"):
        file = Path(env["TINKEX_CONFIG"])
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file))
    values.update(_from_env(env))
    values.update(_known(dict(flags or {}), "flag"))
    values.setdefault("data_dir", default_data_dir(values, env))
    return ServerConfig(**values)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read the config file {file}: {exc.strerror}.") from exc
    try:
        return _known(tomllib.loads(text), f"key in {file}")
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file} is not valid TOML: {exc}.") from exc


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"{ENV_PREFIX}SERVER_"
    prefixed = {key: value for key, value in env.items() if key.startswith(prefix)}
    values = {key.removeprefix(prefix).lower(): value for key, value in prefixed.items()}
    for spec in fields(ServerConfig):  # the short form TINKEX_PORT works too
        if (short := ENV_PREFIX + spec.name.upper()) in env:
            values.setdefault(spec.name, env[short])
    return _known(values, f"{ENV_PREFIX}SERVER_* variable")


def _known(values: dict[str, Any], origin: str) -> dict[str, Any]:
    types = {spec.name: spec.type for spec in fields(ServerConfig)}
    for name in values:
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1, cutoff=0.6)
            known = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(types))}."
            raise ConfigError(f"unknown {origin}: {name!r}. {known}")
    return {k: _coerce(k, str(types[k]), v) for k, v in values.items() if v is not None}


def _coerce(name: str, wanted: str, value: Any) -> Any:
    try:
        if wanted == "int":
            return int(value)
        if wanted == "float":
            return float(value)
        if wanted == "bool":
            return _as_bool(value)
        if wanted == "Path":
            return Path(value)
        if wanted.startswith("tuple"):
            return _as_tuple(value)
        if wanted.startswith("Mapping"):
            return _as_mapping(value)
        return str(value)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{name} cannot be read from {value!r}; expected {wanted}.") from exc


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)


def _as_tuple(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(str(part) for part in value)


def _as_mapping(value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {str(k): str(v) for k, v in value.items()}
    pairs = [part.partition("=") for part in _as_tuple(value)]
    if any(not sep for _, sep, _ in pairs):
        raise ValueError("expected NAME=MODEL")
    return {name: target for name, _, target in pairs}

"""The settings of one client: a frozen value, built once, with the environment read at that moment.

Several configs live side by side; nothing here is global and nothing touches the network. Printing
a config never shows a secret. Where a credential comes from is `credentials.py`; what is done with
the settings is everyone else's business.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from tinkex.client.credentials import load_default_key, mask
from tinkex.client.spelling import warn_of_variables
from tinkex.errors import ConfigError

HOSTED_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
"""The base URL that means: a server of this user on this machine."""

_OFF = frozenset({"0", "false", "no", "off"})
_ON = frozenset({"1", "true", "yes", "on"})
_LEVELS = frozenset({"debug", "info", "warning", "error"})
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
LOCAL_KEY = "tml-local"
LLAMA3_MIRRORS = (
    "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    "baseten/Meta-Llama-3-tokenizer",
)
POOLS = frozenset("auth config futures poller redirect sample session telemetry train".split())
"""The kinds of calls, each with connections of its own."""
_TEXTS = "base_url api_key credential_cmd project_id display_name model log_level".split()
_FLAGS = "is_private telemetry extensions circuit_breaker verify_tls".split()
_LISTS = "tags tokenizer_mirrors".split()
_MAPPINGS = "headers user_metadata pool_connections".split()


def _frozen(values: Mapping[str, str] | None) -> Mapping[str, str]:
    return MappingProxyType(dict(values or {}))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ClientConfig:
    """Everything a client needs to know before its first call. Make one with `from_env`."""

    base_url: str
    """Root of the service, without a trailing slash, or "local" for the embedded server."""
    api_key: str | None = None
    """Sent as `X-API-Key`. None: the credential command supplies one."""
    credential_cmd: str | None = None
    """A shell command that prints a credential; run for every token request."""
    timeout_s: float = 60.0
    """Longest wait for one HTTP answer."""
    connect_timeout_s: float = 5.0
    """Longest wait for a connection."""
    max_retries: int | None = None
    """Most tries of a call after its first; 0 fails at once. None: as many as fit the window."""
    retry_window_s: float = 300.0
    """How long a call is tried again after connection errors, 408, 409, 429 and 5xx."""
    startup_window_s: float = 15.0
    """How long a server is tried that never answered yet: it may be starting, or not be there."""
    max_connections: int = 1000
    """Most open connections per pool; each kind of call has its own pool."""
    pool_connections: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The same by pool, where it is to differ: `{"sample": 400, "train": 8}`."""
    heartbeat_interval_s: float = 10.0
    """Seconds between two signs of life of a session."""
    headers: Mapping[str, str] = field(default_factory=lambda: _frozen(None))
    """Sent with every request; they win over ours."""
    user_metadata: Mapping[str, str] = field(default_factory=lambda: _frozen(None))
    """Attached to the session."""
    project_id: str | None = None
    """Project of the session, and where `copy_weights` copies to."""
    display_name: str | None = None
    """Name of the session in listings."""
    model: str | None = None
    """The base model of calls that name none. The local server loads it."""
    is_private: bool = True
    """With the base URL `local`: the private server alone, never a `tinkex serve` of this user.
    `from_env` lets that one do, too, where nobody named a server."""
    tags: tuple[str, ...] = ()
    """Tags of the session."""
    tokenizer_mirrors: tuple[str, ...] = LLAMA3_MIRRORS
    """Where else the tokenizer of a model with "Llama-3" in its name is looked for."""
    telemetry: bool = True
    """Report errors to the server. Off against a local server unless asked for."""
    extensions: bool = True
    """Use what a Tinkex server offers beyond the contract; off speaks the plain contract."""
    circuit_breaker: bool = False
    """Stop calling a host for a while after repeated failures."""
    verify_tls: bool = True
    """Check the server's certificate. Off only for tests with a certificate of one's own."""
    log_level: str | None = None
    """`debug`, `info`, `warning` or `error`: shows our log on stderr. None leaves logging alone."""

    def __post_init__(self) -> None:
        for name in (*_TEXTS, *_FLAGS, *_LISTS, *_MAPPINGS):
            _check_kind(name, getattr(self, name))
        if self.base_url != LOCAL and urlsplit(self.base_url).scheme not in ("http", "https"):
            raise ConfigError(
                f"base_url must start with http:// or https://, or be 'local'; got "
                f"{self.base_url!r}. Check the argument and TINKER_BASE_URL."
            )
        for name in ("timeout_s", "connect_timeout_s", "heartbeat_interval_s"):
            if not _number(value := getattr(self, name), name, whole=False) > 0:
                raise ConfigError(f"{name} must be above 0, got {value}.")
        for name, least in (
            ("max_retries", 0),
            ("retry_window_s", 0),
            ("startup_window_s", 0),
            ("max_connections", 1),
        ):
            if (value := getattr(self, name)) is None and name == "max_retries":
                continue
            if not _number(value, name, whole=name.startswith("max_")) >= least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
        if self.log_level is not None and self.log_level.lower() not in _LEVELS:
            raise ConfigError(
                f"log_level must be one of {', '.join(sorted(_LEVELS))}, got {self.log_level!r}. "
                "Check TINKER_LOG and TINKEX_LOG."
            )
        check_headers(self.headers)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError(
                f"api_key holds a line break or another letter that cannot travel, got "
                f"{mask(self.api_key)}. Copy it again, without what stands around it."
            )
        for pool, most in self.pool_connections.items():
            if pool not in POOLS or not _number(most, f"pool_connections[{pool!r}]") >= 1:
                raise ConfigError(
                    f"pool_connections takes at least 1 for each of {', '.join(sorted(POOLS))}; "
                    f"got {pool}={most}."
                )
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @classmethod
    def from_env(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> ClientConfig:
        """Build a config from arguments first, the environment second.

        Base URL: the argument, `TINKER_BASE_URL`, the hosted service when a credential is set,
        else the embedded local server.
        """
        for name, value in (("base_url", base_url), ("headers", settings.get("headers"))):
            _check_kind(name, value)
        env = os.environ if env is None else env
        warn_of_variables(env, _VARIABLES)
        key = api_key or _named(env, "API_KEY")
        command = settings.pop("credential_cmd", None) or _named(env, "CREDENTIAL_CMD")
        url = (base_url or _named(env, "BASE_URL") or "").rstrip("/")
        if not key and not command and url != LOCAL and not is_loopback(url):
            key = load_default_key(env)
        settings.setdefault("is_private", url == LOCAL)
        url = url or (HOSTED_BASE_URL if key or command else LOCAL)
        if not key and not command and (url == LOCAL or is_loopback(url)):
            key = LOCAL_KEY
        settings = {name: value for name, value in settings.items() if value is not None}
        settings.setdefault("project_id", _named(env, "PROJECT_ID"))
        settings.setdefault("tags", _listed(env, "TAGS"))
        settings.setdefault("tokenizer_mirrors", _listed(env, "TOKENIZER_MIRRORS"))
        if not settings["tokenizer_mirrors"]:
            del settings["tokenizer_mirrors"]
        settings.setdefault("model", env.get("TINKEX_LOCAL_MODEL") or None)
        settings.setdefault("telemetry", _telemetry(env, default=not _is_local(url)))
        settings.setdefault("log_level", _named(env, "LOG"))
        headers = {**_access_headers(env), **settings.pop("headers", {})}
        _read_numbers(settings, env)
        config = cls(base_url=url, api_key=key, credential_cmd=command, headers=headers, **settings)
        config._check_credential()
        return config

    def _check_credential(self) -> None:
        if self.api_key is None and self.credential_cmd is None:
            raise ConfigError(
                f"No credential for {self.base_url}. Pass api_key=, set TINKER_API_KEY or "
                "TINKER_CREDENTIAL_CMD, or store one with `tinkex auth login`. To work without "
                "one, use base_url='local'."
            )
        hosted = self.base_url == HOSTED_BASE_URL
        if hosted and self.api_key and not self.api_key.startswith(("tml-", "eyJ")):
            if self.credential_cmd is None:
                raise ConfigError(
                    f"The hosted service takes keys that start with 'tml-' (or a JWT, 'eyJ'), got "
                    f"{mask(self.api_key)}. Check TINKER_API_KEY."
                )
            object.__setattr__(self, "api_key", None)

    @property
    def is_local(self) -> bool:
        """True for the embedded server and for any server on this machine."""
        return _is_local(self.base_url)

    @property
    def console(self) -> str | None:
        """The root of the server whose console shows what is made here; None: the hosted one."""
        return None if self.base_url == HOSTED_BASE_URL else self.base_url

    def set_up_logging(self) -> None:
        """Honour TINKER_LOG: our log at that level, on stderr unless the program has handlers."""
        if self.log_level is None:
            return
        logger = logging.getLogger("tinkex")
        logger.setLevel(self.log_level.upper())
        if not logging.getLogger().handlers and not logger.handlers:
            logger.addHandler(logging.StreamHandler())

    def replace(self, **changes: Any) -> ClientConfig:
        return replace(self, **changes)

    def __repr__(self) -> str:
        hidden = {"api_key": mask(self.api_key), "headers": sorted(self.headers)}
        hidden["credential_cmd"] = "***" if self.credential_cmd else None
        parts = []
        for name in self.__dataclass_fields__:
            value = hidden.get(name, getattr(self, name))
            parts.append(f"{name}={dict(value) if isinstance(value, Mapping) else value!r}")
        return f"ClientConfig({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Not `__getstate__`, which Python before 3.11.4 replaces in dataclasses with slots.
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in state.items()}
        return _restored, (type(self), plain)


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse headers that cannot travel, or say how the message is framed.

    Values are not shown: one may be a credential.

    Raises:
        ConfigError: With the name of the header.
    """
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be the name of a header.")
        if name.lower() in _FRAMING:
            raise ConfigError(f"The header {name} is the SDK's own; leave it out.")
        if not isinstance(value, str):
            raise ConfigError(f"The header {name} must be a text, got {type(value).__name__}.")
        if any(sign in value for sign in "\r\n\0"):
            raise ConfigError(f"The header {name} holds a line break or a NUL, which ends it.")
        if not value.isascii():
            raise ConfigError(f"The header {name} holds a letter beyond ASCII, which none carries.")


def _check_kind(name: str, value: Any) -> None:
    """Refuse a setting of another kind; of a value, which may be a credential, the kind is told."""
    if value is None:
        return
    if name in _TEXTS:
        fits, what = isinstance(value, str), "a text"
    elif name in _FLAGS:
        fits, what = isinstance(value, int), "True or False"
    elif name in _LISTS:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        fits, what = is_list and all(isinstance(each, str) for each in value), "a tuple of texts"
    else:
        fits, what = isinstance(value, Mapping), "a dict"
    if not fits:
        raise ConfigError(f"{name} must be {what}, got {type(value).__name__}.")


def _number(value: Any, name: str, *, whole: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        what = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} must be {what}, got {value!r}.")
    return float(value)


def _restored(of: type[ClientConfig], state: dict[str, Any]) -> ClientConfig:
    return of(**state)


def _named(env: Mapping[str, str], name: str) -> str | None:
    """`TINKEX_NAME`, else `TINKER_NAME`; an empty one counts as unset."""
    return env.get(f"TINKEX_{name}") or env.get(f"TINKER_{name}") or None


def is_loopback(url: str) -> bool:
    return bool(url) and url != LOCAL and urlsplit(url).hostname in _LOOPBACK


def _is_local(url: str) -> bool:
    return url == LOCAL or is_loopback(url)


def _listed(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    """A variable of several texts with commas between them, each once."""
    parts = (part.strip() for part in (_named(env, name) or "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _telemetry(env: Mapping[str, str], *, default: bool) -> bool:
    """Any variable that says off wins; a variable that says on overrules the default."""
    given = [
        env[name].strip().lower()
        for name in ("TINKER_TELEMETRY", "TINKEX_TELEMETRY")
        if env.get(name)
    ]
    if any(value not in _ON for value in given):
        return False
    return bool(given) or default


def _access_headers(env: Mapping[str, str]) -> dict[str, str]:
    client_id = env.get("CLOUDFLARE_ACCESS_CLIENT_ID")
    secret = env.get("CLOUDFLARE_ACCESS_CLIENT_SECRET")
    if client_id and secret:
        return {"CF-Access-Client-Id": client_id, "CF-Access-Client-Secret": secret}
    return {}


# TINKEX_CLIENT_TIMEOUT_S=30 and so on: numbers only, so that a typing error is caught here.
_NUMBERS: dict[str, type[int] | type[float]] = {
    "timeout_s": float,
    "connect_timeout_s": float,
    "max_retries": int,
    "retry_window_s": float,
    "startup_window_s": float,
    "max_connections": int,
    "heartbeat_interval_s": float,
}


def _read_numbers(settings: dict[str, Any], env: Mapping[str, str]) -> None:
    for name, kind in _NUMBERS.items():
        variable = f"TINKEX_CLIENT_{name.upper()}"
        if name in settings or not env.get(variable):
            continue
        try:
            settings[name] = kind(env[variable])
        except ValueError:
            raise ConfigError(
                f"{variable} must be a number, got {env[variable]!r}. Unset it for the default."
            ) from None
    for name in _SWITCHES:
        text = env.get(f"TINKEX_CLIENT_{name.upper()}", "").strip().lower()
        if name not in settings and text:
            settings[name] = text not in _OFF


_SWITCHES = ("circuit_breaker", "extensions")
_VARIABLES = {
    name: name
    for name in (
        *("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS", "TELEMETRY", "LOG"),
        *("TOKENIZER_MIRRORS", "HOME", "CACHE", "CONFIG", "DEBUG", "LOCAL_MODEL", "LOCAL_ENGINE"),
        *(f"CLIENT_{name.upper()}" for name in (*_NUMBERS, *_SWITCHES)),
    )
} | {"MODEL": "LOCAL_MODEL", "MODELS": "MODELS", "API_KEYS": "API_KEYS"}
"""The variables of a client, behind `TINKEX_` or `TINKER_`; one that is often meant; and those of
servers that look like one of a client."""

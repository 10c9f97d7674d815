"""A config is a frozen value read from the environment once, and never shows a secret (R7, R9)."""

from __future__ import annotations

import dataclasses
import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex.client import config as config_module
from tinkex.client import spelling
from tinkex.client.config import HOSTED_BASE_URL, ClientConfig
from tinkex.client.credentials import (
    TokenProvider,
    delete_default_key,
    load_default_key,
    run_credential_command,
    store_default_key,
)
from tinkex.client.http.transport import Transport
from tinkex.errors import ConfigError
from tinkex.server.process.config import ServerConfig


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        ({"base_url": "http://a/x/"}, {"TINKER_BASE_URL": "http://b"}, "http://a/x"),
        ({}, {"TINKER_BASE_URL": "http://127.0.0.1:1/"}, "http://127.0.0.1:1"),
        ({}, {"TINKER_BASE_URL": "", "TINKER_API_KEY": "tml-k"}, HOSTED_BASE_URL),
        ({"api_key": "tml-k"}, {}, HOSTED_BASE_URL),
        ({}, {"TINKER_CREDENTIAL_CMD": "echo tml-k"}, HOSTED_BASE_URL),
        ({}, {}, "local"),
        ({"base_url": "local"}, {"TINKER_API_KEY": "tml-k"}, "local"),
    ],
)
def test_the_base_url_comes_from_argument_environment_key_or_is_local(
    given: dict[str, str], env: dict[str, str], expected: str, home: dict[str, str]
) -> None:
    if given.get("base_url", "").startswith("http://a"):
        given = {**given, "api_key": "tml-k"}
    assert ClientConfig.from_env(env={**home, **env}, **given).base_url == expected


def test_a_stored_key_selects_the_hosted_service(home: dict[str, str]) -> None:
    store_default_key("7", {"type": "manual", "key": "tml-stored", "name": "n"}, home)
    config = ClientConfig.from_env(env=home)
    assert (config.base_url, config.api_key) == (HOSTED_BASE_URL, "tml-stored")


def test_the_stored_file_is_private_and_keeps_other_keys(home: dict[str, str]) -> None:
    first = store_default_key("1", {"type": "manual", "key": "tml-1", "name": "a"}, home)
    store_default_key("2", {"type": "generated", "key": "tml-2", "name": "b"}, home)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    stored = json.loads(first.read_text())
    assert stored["version"] == 1
    assert set(stored["keys"]) == {"1", "2"}
    assert load_default_key(home) == "tml-2"
    assert delete_default_key(home) == {"type": "generated", "key": "tml-2", "name": "b"}
    assert load_default_key(home) is None


def test_a_broken_credentials_file_is_named(home: dict[str, str]) -> None:
    folder = Path(home["HOME"]) / ".tinker"
    folder.mkdir()
    (folder / "credentials.json").write_text("{")
    with pytest.raises(ConfigError, match=r"credentials\.json cannot be read"):
        ClientConfig.from_env(env=home)


def test_the_hosted_service_refuses_a_key_of_another_kind(home: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="start with 'tml-'") as caught:
        ClientConfig.from_env(api_key="sk-secret-value", env=home)
    assert "secret-value" not in str(caught.value)


def test_a_remote_server_without_any_credential_is_an_error_that_says_what_to_do(
    home: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        ClientConfig.from_env(base_url="https://elsewhere.test", env=home)


def test_printing_masks_secrets(home: dict[str, str]) -> None:
    config = ClientConfig.from_env(
        api_key="tml-verysecret",
        headers={"Authorization": "hunter2"},
        credential_cmd="echo hunter3",
        env={**home, "CLOUDFLARE_ACCESS_CLIENT_ID": "i", "CLOUDFLARE_ACCESS_CLIENT_SECRET": "h4"},
    )
    for text in (repr(config), str(config), f"{config}"):
        assert not any(secret in text for secret in ("verysecret", "hunter", "h4"))
    assert config.headers["CF-Access-Client-Secret"] == "h4"


def test_a_config_is_frozen_compares_by_content_and_pickles(home: dict[str, str]) -> None:
    config = ClientConfig.from_env(api_key="tml-k", headers={"a": "b"}, env=home)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.headers["x"] = "y"  # type: ignore[index]
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.replace(timeout_s=5.0).timeout_s == 5.0


def test_the_environment_is_read_once(home: dict[str, str]) -> None:
    env = {**home, "TINKER_API_KEY": "tml-a", "TINKER_TAGS": "x, y,x", "TINKER_PROJECT_ID": "p"}
    config = ClientConfig.from_env(env=env)
    env["TINKER_API_KEY"] = "tml-b"
    assert (config.api_key, config.tags, config.project_id) == ("tml-a", ("x", "y"), "p")


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({"TINKER_API_KEY": "tml-k"}, True),
        ({"TINKER_API_KEY": "tml-k", "TINKER_TELEMETRY": "0"}, False),
        ({"TINKER_API_KEY": "tml-k", "TINKEX_TELEMETRY": "off"}, False),
        ({"TINKER_API_KEY": "tml-k", "TINKER_TELEMETRY": "1", "TINKEX_TELEMETRY": "0"}, False),
        ({}, False),
        ({"TINKEX_TELEMETRY": "1"}, True),
    ],
)
def test_telemetry_is_off_when_told_and_against_a_local_server(
    env: dict[str, str], on: bool, home: dict[str, str]
) -> None:
    assert ClientConfig.from_env(env={**home, **env}).telemetry is on


def test_numbers_from_the_environment_are_checked(home: dict[str, str]) -> None:
    env = {**home, "TINKEX_CLIENT_TIMEOUT_S": "7.5", "TINKEX_CLIENT_MAX_RETRIES": "0"}
    config = ClientConfig.from_env(env=env)
    assert (config.timeout_s, config.max_retries) == (7.5, 0)
    with pytest.raises(ConfigError, match="TINKEX_CLIENT_TIMEOUT_S must be a number"):
        ClientConfig.from_env(env={**home, "TINKEX_CLIENT_TIMEOUT_S": "soon"})
    with pytest.raises(ConfigError, match="timeout_s must be above 0"):
        ClientConfig.from_env(env={**home, "TINKEX_CLIENT_TIMEOUT_S": "0"})
    with pytest.raises(ConfigError, match="base_url must start with"):
        ClientConfig.from_env(base_url="ftp://x", env=home, api_key="tml-k")


def test_making_a_client_touches_nothing(home: dict[str, str]) -> None:
    """Nothing runs before the first call: no thread, no connection."""
    import threading

    before = threading.active_count()
    for number in range(3):  # several configs live side by side
        config = ClientConfig(base_url=f"http://127.0.0.1:{number + 1}", api_key=f"tml-{number}")
        tinkex.ServiceClient(config=config)
    assert threading.active_count() == before


def test_an_unknown_argument_is_ignored_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="nonsense.*max_retries"):
        tinkex.ServiceClient(base_url="http://127.0.0.1:1", nonsense=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("base_ulr", "base_url"), ("apikey", "api_key"), ("max_retry", "max_retries")],
)
def test_a_misspelt_argument_is_refused_with_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"no argument '{name}'. Did you mean '{meant}'"):
        tinkex.ServiceClient(**{name: "http://gpu-box:8765"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"timeout": "soon"}, "timeout_s must be a number, got 'soon'"),
        ({"max_retries": 1.5}, "max_retries must be a whole number, got 1.5"),
        ({"max_retries": True}, "max_retries must be a whole number"),
        ({"default_headers": "X-Team: a"}, "default_headers must be a dict, got str"),
        ({"default_headers": {"X Team": "a"}}, "'X Team' cannot be the name of a header"),
        ({"default_headers": {"": "a"}}, "'' cannot be the name"),
        ({"default_headers": {"X-Team": None}}, "X-Team must be a text, got NoneType"),
        ({"default_headers": {"X-Team": "a\r\nX-API-Key: b"}}, "X-Team holds a line break"),
        ({"default_headers": {"X-Team": "\u65e5"}}, "X-Team holds a letter beyond ASCII"),
        ({"api_key": "tml-of-a-file\n"}, r"api_key holds a line break .*got tml-\*\*\*\. Copy"),
        ({"api_key": "tml-\u201cquoted\u201d"}, "api_key holds .* another letter"),
        ({"api_key": 5}, "api_key must be a text, got int"),
        ({"log_level": 5}, "log_level must be a text, got int"),
        ({"verify_tls": "false"}, "verify_tls must be True or False, got str"),
        ({"tokenizer_mirrors": "a/b"}, "tokenizer_mirrors must be a tuple of texts, got str"),
        ({"tags": (1,)}, "tags must be a tuple of texts"),
        ({"user_metadata": 5}, "user_metadata must be a dict, got int"),
        ({"pool_connections": 5}, "pool_connections must be a dict, got int"),
        ({"pool_connections": {"sample": "x"}}, r"pool_connections\['sample'\] must be a whole"),
        ({"base_url": 5}, "base_url must be a text, got int"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tinkex.ServiceClient(**{"base_url": "http://127.0.0.1:1"} | given)


def test_a_timeout_of_httpx_is_taken_for_its_wait_for_an_answer() -> None:
    timeout = tinkex.Timeout(9.0, read=4.0)
    assert (
        tinkex.ServiceClient(base_url="http://127.0.0.1:1", timeout=timeout).config.timeout_s == 4
    )


def test_settings_given_to_the_service_client_mean_what_they_say() -> None:
    service = tinkex.ServiceClient(
        base_url="http://127.0.0.1:1",
        timeout=5,
        max_retries=1,
        default_headers={"X-Team": "a"},
        tags=("x",),
        retry_window_s=7.0,
    )
    config = service.config
    assert (config.timeout_s, config.max_retries, config.retry_window_s) == (5, 1, 7.0)
    assert (dict(config.headers), config.tags) == ({"X-Team": "a"}, ("x",))
    with pytest.raises(ConfigError, match="Give base_url in the config"):
        tinkex.ServiceClient(base_url="http://127.0.0.1:2", config=config)


def test_a_misspelt_variable_is_told_of_once(
    home: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spelling, "_SAID", set())
    env = {**home, "TINKEX_MODLE": "m", "TINKER_API_KEI": "k", "TINKEX_CLIENT_SPEED": "9"}
    for _ in range(2):
        ClientConfig.from_env(env=env)
    assert [record.getMessage() for record in caplog.records] == [
        "TINKEX_MODLE has no effect: there is no such variable. Did you mean TINKEX_LOCAL_MODEL?",
        "TINKER_API_KEI has no effect: there is no such variable. Did you mean TINKER_API_KEY?",
        "TINKEX_CLIENT_SPEED has no effect: there is no such variable.",
    ]


def test_no_variable_of_a_server_or_of_another_program_is_taken_for_a_misspelt_one(
    home: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spelling, "_SAID", set())
    env = {f"TINKEX_{field.name.upper()}": "1" for field in dataclasses.fields(ServerConfig)}
    env |= {name.replace("TINKEX_", "TINKEX_SERVER_"): "1" for name in env}
    env |= {"TINKER_COOKBOOK_CACHE": "1", "TINKEX_SCREENSHOTS": "1", "PATH": "1"}
    spelling.warn_of_variables({**home, **env}, config_module._VARIABLES)
    assert caplog.records == []


def test_the_credential_command_supplies_the_key_and_its_failure_is_named() -> None:
    assert run_credential_command("echo ' tml-cmd '") == "tml-cmd"
    with pytest.raises(ConfigError, match="status 3"):
        run_credential_command("exit 3")
    with pytest.raises(ConfigError, match="no output"):
        run_credential_command("true")


def _token(expiry: float) -> str:
    import base64

    claims = base64.urlsafe_b64encode(json.dumps({"exp": expiry}).encode()).decode().rstrip("=")
    return f"eyJh.{claims}.sig"


async def test_a_token_is_exchanged_once_and_renewed_a_minute_before_its_end() -> None:
    now, exchanged = [0.0], []

    async def exchange(credential: str) -> str:
        exchanged.append(credential)
        return _token(now[0] + 1000)

    provider = TokenProvider("tml-raw", clock=lambda: now[0])
    assert await provider.token() == "tml-raw"
    provider.use_exchange(exchange)
    first = await provider.token()
    now[0] = 939.0
    assert await provider.token() == first
    now[0] = 941.0
    assert await provider.token() != first
    assert exchanged == ["tml-raw", "tml-raw"]


async def test_a_failed_renewal_keeps_the_old_token() -> None:
    now, answers = [0.0], [_token(100.0)]

    async def exchange(credential: str) -> str:
        if not answers:
            raise tinkex.APIConnectionError("down")
        return answers.pop()

    provider = TokenProvider("tml-raw", clock=lambda: now[0])
    provider.use_exchange(exchange)
    first = await provider.token()
    now[0] = 99.0
    assert await provider.token() == first


async def test_a_jwt_given_directly_is_used_as_it_is() -> None:
    async def exchange(credential: str) -> str:
        raise AssertionError("not exchanged")

    provider = TokenProvider("eyJ.direct")
    provider.use_exchange(exchange)
    provider.require_command()
    assert await provider.token() == "eyJ.direct"


def test_tinker_log_shows_our_log_and_nothing_else(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    logger = logging.getLogger("tinkex")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ClientConfig.from_env(env=home).set_up_logging()
    assert logger.handlers == []
    ClientConfig.from_env(env={**home, "TINKER_LOG": "debug"}).set_up_logging()
    assert (logger.level, len(logger.handlers)) == (logging.DEBUG, 1)
    with pytest.raises(ConfigError, match="TINKER_LOG"):
        ClientConfig.from_env(env={**home, "TINKER_LOG": "loud"})


def test_auth_answers_without_running_a_command(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TINKER_API_KEY", "TINKEX_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home["HOME"])
    assert tinkex.auth.get_tinker_token() is None
    assert not tinkex.auth.tinker_has_credentials()
    with pytest.raises(tinkex.TinkerError, match="TINKER_API_KEY"):
        tinkex.auth.raise_if_tinker_not_accessible()
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "touch /nonexistent/never-run")
    assert tinkex.auth.tinker_has_credentials()
    assert tinkex.auth.get_tinker_token() is None
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    assert tinkex.auth.get_tinker_token() == "tml-env"


def test_access_is_checked_with_one_request(
    toy_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    monkeypatch.setenv("TINKER_BASE_URL", toy_server)
    tinkex.auth.raise_if_tinker_not_accessible()
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    with pytest.raises(tinkex.APIConnectionError):
        tinkex.auth.raise_if_tinker_not_accessible()


def test_each_pool_may_have_its_own_number_of_connections() -> None:
    config = ClientConfig(
        base_url="http://127.0.0.1:1", pool_connections={"sample": 400, "train": 8}
    )
    transport = Transport(config, TokenProvider("tml-k"))
    most = {pool: transport._pool(pool).backend._max for pool in ("sample", "train", "session")}
    assert most == {"sample": 400, "train": 8, "session": 1000}
    assert pickle.loads(pickle.dumps(config)) == config
    for wrong in ({"samples": 4}, {"sample": 0}):
        with pytest.raises(ConfigError, match="pool_connections takes at least 1 for each of auth"):
            ClientConfig(base_url="http://127.0.0.1:1", pool_connections=wrong)

"""Settings: defaults, file, environment, flags, in that order, and nothing unknown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.server.process.config import ServerConfig, load_config


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nhold_s = 2.5\nmodels = ["a", "b"]\n[aliases]\nx = "a"\n')
    env = {"TINKEX_SERVER_PORT": "2", "TINKEX_ENGINE": "toy", "UNRELATED": "1"}
    config = load_config(file=file, env=env, flags={"port": 3, "host": None})
    assert (config.port, config.hold_s, config.engine) == (3, 2.5, "toy")
    assert config.models == ("a", "b")
    assert config.aliases == {"x": "a"}
    assert load_config(file=file, env=env).port == 2
    assert load_config(env={"TINKEX_CONFIG": str(file)}).port == 1


@pytest.mark.parametrize(
    ("source", "values"),
    [("file", "prot = 1"), ("env", {"TINKEX_SERVER_PROT": "1"}), ("flags", {"prot": 1})],
)
def test_unknown_keys_are_errors_wherever_they_stand(
    tmp_path: Path, source: str, values: object
) -> None:
    if source == "file":
        file = tmp_path / "server.toml"
        file.write_text(str(values))
        values = file
    with pytest.raises(ConfigError, match="unknown .*prot"):
        load_config(**({"env": {}} | {source: values}))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_another_address_than_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="no api key.*--user NAME --data-dir '/my data'`"):
        ServerConfig(host=host, data_dir=Path("/my data")).require_key(is_any_stored=False)
    ServerConfig(host=host).require_key(is_any_stored=True)
    ServerConfig(host=host, api_keys=("tml-a=ada",)).require_key(is_any_stored=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    ServerConfig(host=host).require_key(is_any_stored=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "jax"},
        {"port": 70000},
        {"hold_s": 0},
        {"devices": ()},
        {"log_level": "loud"},
        {"api_keys": ("secret",)},
        {"aliases": {"x": ""}},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**wrong)  # type: ignore[arg-type]


def test_the_printed_config_holds_no_secret() -> None:
    config = ServerConfig(
        api_keys=("tml-secret=ada",), database="postgresql://me:hunter2@db.example/tinkex"
    )
    shown = str(config.describe())
    assert "secret" not in shown
    assert "hunter2" not in shown
    assert "ada" in shown
    assert "db.example" in shown


def test_every_setting_is_documented() -> None:
    import ast
    import inspect

    from tinkex.server.process import config as module

    tree = ast.parse(inspect.getsource(module))
    (found,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerConfig"
    ]
    documented = {
        before.target.id
        for before, after in zip(found.body, found.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize("name", ["max_unnamed_samplers", "max_user_queued", "until_idle_s"])
def test_a_setting_whose_0_means_something_takes_it(name: str) -> None:
    assert getattr(load_config(env={}, flags={name: 0}), name) == 0

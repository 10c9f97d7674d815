"""What lies in deploy/ names only what exists: settings, flags and metrics."""

from __future__ import annotations

import configparser
import json
import re
import runpy
import tomllib
from pathlib import Path

import click
import yaml
from app_world import AppWorld

from tinkex.server.process.config import ServerConfig
from tinkex.server.serve import serve

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def _flags(command: click.Command) -> set[str]:
    return {option for param in command.params for option in param.opts}


async def test_the_dashboard_shows_metrics_that_exist(app_world: AppWorld) -> None:
    await app_world.session()
    board = json.loads((DEPLOY / "grafana.json").read_text())
    shown = {t["expr"] for panel in board["panels"] for t in panel["targets"]}
    names = {name for expr in shown for name in re.findall(r"tinkex_\w+", expr)}
    text = (await app_world.http.get("/metrics")).text
    assert len(names) > 10
    assert {name for name in names if name not in text} == set()


def test_the_script_that_tries_the_image_follows_every_step(tmp_path: Path) -> None:
    script = runpy.run_path(str(DEPLOY / "try_image.py"))
    steps = script["steps"]((DEPLOY / "Dockerfile").read_text())
    image = script["Image"](tmp_path, {"TORCH": "cuda"})
    for instruction, rest in steps:
        if instruction not in ("RUN", "COPY"):
            image.do(instruction, rest)
    assert image.env["TORCH"] == "cuda"
    assert image.env["TINKEX_HOME"] == f"{tmp_path}/data"
    assert image.command[:2] == ["tinkex", "serve"]
    assert f"{tmp_path}/run/secrets/tinkex_keys" in image.command
    assert (
        image.moved("http://x/data /opt/tinkex/bin") == f"http://x/data {tmp_path}/opt/tinkex/bin"
    )
    assert "healthz" in " ".join(image.health)


def test_the_settings_of_a_shared_server_are_settings(tmp_path: Path) -> None:
    values = tomllib.loads((DEPLOY / "server.toml").read_text())
    keys = tmp_path / "keys"
    keys.write_text("tml-one=ann\n")
    keys.chmod(0o600)
    config = ServerConfig(**values | {"api_key_file": str(keys)})
    assert config.api_keys == ("tml-one=ann",)


def test_image_and_unit_start_the_server_with_flags_it_has() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    started = json.loads(image[image.rindex("CMD [") + 4 :].replace("\\\n", ""))
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "tinkex.service")
    for command in (started, unit["Service"]["ExecStart"].split()):
        assert Path(command[0]).name == "tinkex"
        assert command[1] == "serve"
        assert {word for word in command if word.startswith("--")} <= _flags(serve)
    assert "USER 10001" in image
    assert unit["Service"]["UMask"] == "0077"


def test_ray_files_start_the_server_with_flags_it_has() -> None:
    local = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    assert local["max_workers"] == len(local["provider"]["worker_ips"])
    claim, cluster, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    assert [part["kind"] for part in (claim, cluster, service)] == [
        "PersistentVolumeClaim",
        "RayCluster",
        "Service",
    ]
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    words = head["args"][0].partition("tinkex serve")[2].split()
    assert {word for word in words if word.startswith("--")} <= _flags(serve)
    ports = {port["containerPort"] for port in head["ports"]}
    assert service["spec"]["ports"][0]["port"] in ports

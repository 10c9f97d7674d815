"""Addresses for people to click: of the hosted console, and of a server's own."""

from __future__ import annotations

import tinkex
from tinkex.client.config import HOSTED_BASE_URL, ClientConfig
from tinkex.types.account import console_urls

HOSTED = "https://tinker.thinkingmachines.ai"


def test_addresses_of_the_hosted_console() -> None:
    assert console_urls.session_url() == f"{HOSTED}/sessions"
    assert console_urls.session_url("s") == f"{HOSTED}/sessions/s"
    assert console_urls.training_run_url("s:train:0") == f"{HOSTED}/training_runs/s:train:0"
    assert console_urls.checkpoint_url("r", "weights/a") == f"{HOSTED}/checkpoints/r/weights%2Fa"
    path = "tinker://r/weights/a"
    checkpoint = "tinker%3A%2F%2Fr%2Fweights%2Fa"
    assert console_urls.playground_url(path) == (
        f"{HOSTED}/playground?mode=checkpoint&checkpoint={checkpoint}"
    )


def test_addresses_of_a_servers_own_console() -> None:
    server = "http://gpu-box:8765"
    assert console_urls.session_url("s", server) == f"{server}/console"
    assert console_urls.training_run_url("r", server) == f"{server}/console/runs/r"
    assert ClientConfig(base_url=server).console == server
    assert ClientConfig(base_url=HOSTED_BASE_URL, api_key="tml-k").console is None


def test_a_run_and_its_service_point_to_the_server_that_has_them(toy_server: str) -> None:
    import httpx

    with tinkex.ServiceClient(base_url=toy_server) as service:
        assert service.get_console_url() == f"{toy_server}/console"
        training = service.create_lora_training_client("toy", rank=4)
        url = training.get_console_url()
        assert url == f"{toy_server}/console/runs/{training.model_id}"
        page = httpx.get(url, follow_redirects=True, trust_env=False)
        assert page.status_code == 200
        assert training.model_id in page.text or "console" in str(page.url)

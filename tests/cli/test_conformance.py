"""The suite passes against our server and finds what is broken in another."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from tiny_llama import tiny_llama

from tinkex.conformance import run_suite
from tinkex.conformance.probe import Probe


def test_our_server_fails_no_check(cli):
    ran = cli("conformance", "--json")
    assert ran.code == 0, [c for c in ran.json["checks"] if c["status"] == "fail"]
    shown = ran.json
    assert shown["counts"].get("fail", 0) == 0
    assert shown["counts"]["pass"] >= 58
    unsupported = {c["got"] for c in shown["checks"] if c["status"] == "unsupported"}
    assert unsupported == {"the server takes any key", "custom_loss_server_side is off"}


def test_a_table_of_a_few_checks(cli):
    ran = cli("conformance", "-k", "healthz")
    assert "Contract: 1 pass, 0 fail, 0 unsupported" in ran.out
    assert cli("conformance", "-k", "nothing like this").code == 2


@pytest.fixture
def broken_proxy(toy_server):
    """Passes everything on to the toy server, except what a test breaks."""
    broken: dict[str, bytes | None] = {}

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _relay(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            name = self.path.split("?")[0].rpartition("/")[2]
            if name in broken:
                self._answer(
                    200 if broken[name] else 404, "application/json", broken[name] or b"{}"
                )
                return
            headers = {k: v for k, v in self.headers.items() if k not in ("Host", "Content-Length")}
            answer = httpx.request(
                self.command, toy_server + self.path, content=body, headers=headers, timeout=60
            )
            self._answer(answer.status_code, answer.headers.get("content-type", ""), answer.content)

        do_GET = do_POST = do_PUT = do_DELETE = _relay

        def _answer(self, status, kind, body):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", broken
    server.shutdown()
    thread.join()
    server.server_close()


def outcomes(base_url, only):
    probe = Probe(base_url, "tml-x", timeout_s=60)
    try:
        return {outcome.claim: outcome for outcome in run_suite(probe, only)}
    finally:
        probe.close()


def test_a_broken_answer_is_a_failure_that_shows_both_sides(broken_proxy):
    base_url, broken = broken_proxy
    broken["healthz"] = b'{"status": "fine"}'
    (outcome,) = outcomes(base_url, "healthz").values()
    assert outcome.status == "fail"
    assert outcome.expected == '{"status": "ok"}'
    assert "fine" in outcome.got


def test_a_missing_endpoint_is_unsupported_and_a_needed_one_a_failure(broken_proxy):
    base_url, broken = broken_proxy
    broken["telemetry"] = broken["config"] = None
    assert outcomes(base_url, "telemetry")["telemetry is accepted"].status == "unsupported"
    (outcome,) = outcomes(base_url, "client/config answers").values()
    assert outcome.status == "fail"
    assert "clients cannot start without it" in outcome.expected


def test_one_broken_endpoint_fails_its_checks_and_no_others(broken_proxy):
    base_url, broken = broken_proxy
    broken["optim_step"] = b'{"nothing": "here"}'
    found = outcomes(base_url, "2.3")
    assert found["training lowers the loss"].status == "fail"
    assert "request_id" in found["training lowers the loss"].expected
    created = "create_model names the run <session>:train:<seq> and get_info describes it"
    assert found[created].status == "pass"


@pytest.fixture(scope="module")
def torch_server(start_server, tmp_path_factory):
    """The real engine on a tiny random model, with a key."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_llama(folder, vocab_size=512, max_position_embeddings=512)
    flags = ("--model", str(folder), "--api-key", "tml-conformance=me")
    with start_server(tmp_path_factory.mktemp("server"), *flags) as base_url:
        yield base_url


def test_the_real_engine_passes_every_check(torch_server, monkeypatch, capsys):
    from tinkex.cli.app import run

    monkeypatch.setenv("TINKER_API_KEY", "tml-conformance")
    code = run(["conformance", "--base-url", torch_server, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert [c for c in shown["checks"] if c["status"] != "pass"] == []
    assert code == 0


def test_a_server_that_is_not_there_is_one_line(cli):
    ran = cli("conformance", "--base-url", "http://127.0.0.1:9")
    assert ran.code == 1
    assert "Could not reach http://127.0.0.1:9" in ran.err
    assert "fail" not in ran.out

"""HTTPS without a proxy: clients verify the server, and wrong files are told before it listens."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from datums import datum
from patience import PATIENCE_S, until
from server_process import ServerProcess, refused_start

import tinkex
from tinkex.errors import APIConnectionError
from tinkex.server.process.config import load_config
from tinkex.types import AdamParams, ModelInput, SamplingParams


def make_cert(folder: Path, name: str, *extra: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, made as an operator would."""
    assert shutil.which("openssl"), "this test makes certificates with the openssl command"
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", *(extra or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Path, Path]:
    return make_cert(folder, "server")


def patient_client(url: str) -> tinkex.ServiceClient:
    """A client that tries again for longer than any machine takes to fail at once."""
    windows = {"startup_window_s": 2 * PATIENCE_S, "retry_window_s": 2 * PATIENCE_S}
    return tinkex.ServiceClient(base_url=url, api_key="tml-x", **windows)


def test_tls_to_a_port_that_speaks_none_fails_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--engine", "toy") as server:
        url = server.base_url.replace("http:", "https:")
        began = time.monotonic()
        with pytest.raises(APIConnectionError, match="does not speak TLS.*http://"):
            patient_client(url).get_server_capabilities()
        assert time.monotonic() - began < PATIENCE_S


def test_a_client_that_trusts_the_certificate_trains_and_one_that_does_not_is_told(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--engine", "toy", "--tls-cert", str(pair[0]), "--tls-key", str(pair[1]))
    with ServerProcess(tmp_path, *flags) as server:
        url = server.base_url.replace("http:", "https:")
        # At once, with all the patience that a client has: waiting makes no certificate good.
        began = time.monotonic()
        with pytest.raises(APIConnectionError, match="does not verify.*SSL_CERT_FILE"):
            patient_client(url).get_server_capabilities()
        assert time.monotonic() - began < PATIENCE_S
        monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
        with tinkex.ServiceClient(base_url=url, api_key="tml-x") as service:
            training = service.create_lora_training_client("toy", rank=4, seed=1)
            losses = []
            for _ in range(2):
                done = training.forward_backward([datum([3, 1, 4, 1, 5])], "cross_entropy").result()
                losses.append(done.metrics["loss:sum"])
                training.optim_step(AdamParams(learning_rate=0.1)).result()
            assert losses[1] < losses[0]
            saved = training.save_weights_for_sampler("a").result()
            sampler = service.create_sampling_client(model_path=saved.path)
            prompt, params = ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=3)
            assert sampler.sample(prompt, 1, params).result().sequences[0].tokens
            archive = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(
                saved.path
            )
            assert archive.result().url.startswith(url), "links lead back the same way"


def test_plain_http_to_a_port_that_speaks_tls_is_told_within_seconds(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    """It was tried for five minutes, as a server is that went away while it worked."""
    flags = ("--engine", "toy", "--tls-cert", str(pair[0]), "--tls-key", str(pair[1]))
    with ServerProcess(tmp_path, *flags) as server:
        url, began = server.base_url.replace("https:", "http:"), time.monotonic()
        with (
            tinkex.ServiceClient(base_url=url, api_key="tml-x", startup_window_s=1.0) as service,
            pytest.raises(APIConnectionError, match="If it speaks TLS.*https://"),
        ):
            service.get_server_capabilities().result()
        assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """It said for 15 seconds that a server may be away."""
    from click import ClickException

    from tinkex.cli.address import send

    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    url, said = "https://127.0.0.1:9", f"certificates of SSL_CERT_FILE={file} cannot be read"
    with pytest.raises(APIConnectionError, match=said):
        patient_client(url).get_server_capabilities()
    with pytest.raises(ClickException, match=said):
        send("GET", url, "/v1/models", "")


def test_commands_that_speak_raw_http_say_what_to_do_about_a_certificate(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    from click import ClickException

    from tinkex.cli.address import send

    flags = ("--engine", "toy", "--tls-cert", str(pair[0]), "--tls-key", str(pair[1]))
    with ServerProcess(tmp_path, *flags) as server:
        url = server.base_url.replace("http:", "https:")
        with pytest.raises(ClickException, match="does not verify.*SSL_CERT_FILE"):
            send("GET", url, "/v1/models", "")


def test_files_that_are_missing_mismatched_or_encrypted_are_told_at_the_start(
    folder: Path, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    cert, key = map(str, pair)
    _, other_key = map(str, make_cert(folder, "other"))
    _, locked_key = map(str, make_cert(folder, "locked", "-passout", "pass:secret"))
    absent = str(folder / "absent.pem")
    text = str(tmp_path / "text.pem")
    Path(text).write_text("not a certificate")

    def fails(*flags: str) -> str:
        return refused_start("--engine", "toy", "--port", "0", *flags)

    assert "tls_key is not; HTTPS needs both" in fails("--tls-cert", cert)
    assert "tls_cert is not; HTTPS needs both" in fails("--tls-key", key)
    assert f"cannot read {absent}: No such file" in fails("--tls-cert", absent, "--tls-key", key)
    assert "is not the key of the certificate" in fails("--tls-cert", cert, "--tls-key", other_key)
    assert "is encrypted" in fails("--tls-cert", cert, "--tls-key", locked_key)
    assert "PEM format" in fails("--tls-cert", text, "--tls-key", key)


def test_a_certificate_may_stand_in_the_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('tls_cert = "/c.pem"\ntls_key = "/k.pem"\n')
    assert load_config(file=file, env={}).tls_key == "/k.pem"
    env = {"TINKEX_SERVER_TLS_CERT": "/e.pem", "TINKEX_TLS_KEY": "/f.pem"}
    assert load_config(env=env).tls_cert == "/e.pem"
    assert load_config(env=env).tls_key == "/f.pem"


def test_a_renewed_certificate_is_used_after_a_sighup(tmp_path: Path) -> None:
    cert, key = make_cert(tmp_path, "live")
    flags = ("--engine", "toy", "--tls-cert", str(cert), "--tls-key", str(key))
    with ServerProcess(tmp_path, *flags) as server:
        address = ("127.0.0.1", server.port)
        before = ssl.get_server_certificate(address)
        new_cert, new_key = make_cert(tmp_path, "renewed")
        new_key.replace(key)
        os.kill(server.pid, signal.SIGHUP)  # half renewed: the old one stays
        time.sleep(0.5)
        assert ssl.get_server_certificate(address) == before
        new_cert.replace(cert)
        os.kill(server.pid, signal.SIGHUP)
        until(lambda: ssl.get_server_certificate(address) != before, lambda: server.log)

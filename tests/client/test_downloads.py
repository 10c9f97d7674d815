"""Downloads that resume, archives that cannot escape, pushes to the hub (R26)."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tinkex.client.service import downloads
from tinkex.errors import APIConnectionError, APIStatusError, HubError, InvalidInputError

CONTENT = bytes(range(256)) * 2000


class Flaky(ThreadingHTTPServer):
    """Serves CONTENT with ranges; closes the connection after `cuts[i]` bytes of answer i."""

    daemon_threads = True

    def __init__(self, *, cuts=(), tag='"v1"', status=None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cuts, self.tag, self.status = list(cuts), tag, status
        self.ranges: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/file?signature=abc"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Flaky

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers.get("Range"))
        if self.server.status is not None:
            self.send_error(self.server.status)
            return
        start = 0
        wanted = self.headers.get("Range")
        if wanted and self.headers.get("If-Range") == self.server.tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if self.server.tag:
            self.send_header("ETag", self.server.tag)
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else None
        self.wfile.write(body if cut is None else body[:cut])

    def log_message(self, *_) -> None:
        pass


def fetch(server, target, **options):
    options.setdefault("sleep", lambda seconds: None)
    downloads.fetch(server.url, target, **options)


def test_a_broken_download_goes_on_where_it_stopped(tmp_path):
    """R26: two cuts, three requests, no byte asked for twice."""
    target = tmp_path / "file"
    seen = []
    with Flaky(cuts=[100_000, 50_000]) as server:
        fetch(server, target, on_progress=lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    assert os.listdir(tmp_path) == ["file"]


def test_a_later_call_resumes_what_an_earlier_one_left(tmp_path):
    target = tmp_path / "file"
    with Flaky(cuts=[70_000]) as server:
        with pytest.raises(APIConnectionError, match=r"broke off 1 times.*call again to go on"):
            fetch(server, target, tries=1)
        fetch(server, target)
    assert server.ranges == [None, "bytes=70000-"]
    assert target.read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_starts_over(tmp_path):
    target = tmp_path / "file"
    with Flaky(cuts=[70_000]) as server:
        with pytest.raises(APIConnectionError):
            fetch(server, target, tries=1)
        server.tag = '"v2"'
        fetch(server, target)
    assert target.read_bytes() == CONTENT


def test_without_a_version_tag_nothing_is_glued_together(tmp_path):
    target = tmp_path / "file"
    with Flaky(cuts=[70_000], tag="") as server:
        fetch(server, target)
    assert server.ranges == [None, None]
    assert target.read_bytes() == CONTENT


def test_a_refusal_is_raised_at_once_and_names_no_signature(tmp_path):
    with Flaky(status=403) as server, pytest.raises(APIStatusError, match="403") as caught:
        fetch(server, tmp_path / "file")
    assert len(server.ranges) == 1
    assert "signature" not in str(caught.value)


# ---------------------------------------------------------------------------------------- archive


def archive(tmp_path, *members, mode="w"):
    path = tmp_path / "a.tar"
    with tarfile.open(path, mode) as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(content)
            info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            tar.addfile(info, io.BytesIO(content))
    return path


FILE = tarfile.REGTYPE


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_plain_files_are_unpacked(tmp_path, mode):
    source = archive(
        tmp_path, ("d", b"", tarfile.DIRTYPE), ("d/a", b"1", FILE), ("b", b"22", FILE), mode=mode
    )
    out = tmp_path / "out"
    out.mkdir()
    downloads.extract_archive(source, out)
    assert (out / "d" / "a").read_bytes() == b"1"
    assert (out / "b").read_bytes() == b"22"


@pytest.mark.parametrize(
    ("member", "word"),
    [
        (("../evil", b"x", FILE), "stay inside"),
        (("/tmp/evil", b"x", FILE), "stay inside"),
        (("a/../../evil", b"x", FILE), "stay inside"),
        (("a\\..\\evil", b"x", FILE), "stay inside"),
        (("link", b"", tarfile.SYMTYPE), "not a plain file"),
        (("hard", b"", tarfile.LNKTYPE), "not a plain file"),
        (("pipe", b"", tarfile.FIFOTYPE), "not a plain file"),
        (("device", b"", tarfile.CHRTYPE), "not a plain file"),
        (("ok", b"y", FILE), "comes twice"),
        (("big", b"x" * 5000, FILE), "larger than it may become"),
    ],
)
def test_an_archive_that_could_escape_is_refused(tmp_path, member, word):
    """R26: path traversal, links, devices, duplicates, bombs."""
    source = archive(tmp_path, ("ok", b"x", FILE), member)
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    with pytest.raises(InvalidInputError) as caught:
        downloads.extract_archive(source, out, max_bytes=4000)
    assert word in str(caught.value)
    assert not list(tmp_path.rglob("evil"))


def test_half_an_archive_is_refused(tmp_path):
    source = archive(tmp_path, ("a", b"x" * 100_000, FILE))
    source.write_bytes(source.read_bytes()[:50_000])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InvalidInputError, match="not a whole tar"):
        downloads.extract_archive(source, out)


# -------------------------------------------------------------------------------------------- hub


class RecordingHub:
    """Stands for `huggingface_hub.HfApi`: keeps the calls and the files it would upload."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.files: dict[str, str] = {}

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, *, folder_path, ignore_patterns, allow_patterns, **options):
        from huggingface_hub.utils import filter_repo_objects

        names = sorted(os.listdir(folder_path))
        kept = filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in kept:
            with open(os.path.join(folder_path, name)) as file:
                self.files[name] = file.read()
        self.calls.append(("upload_folder", options))
        return "https://hub/commit/1"


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/base", "r": 8})
    )
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        (folder / name).write_text("x")
    manifest = {"base_fingerprint": "0123456789abcdef", "has_optimizer": True}
    (folder / "tinkex.json").write_text(json.dumps(manifest))
    return folder


def test_an_adapter_is_pushed_private_with_a_card_and_without_its_optimizer(adapter):
    """R26."""
    hub = RecordingHub()
    url = downloads.push_to_hub(adapter, "me/thing", api=hub, revision="try")
    assert url == "https://hub/commit/1"
    assert hub.calls[0] == (
        "create_repo",
        {"repo_id": "me/thing", "private": True, "exist_ok": True, "repo_type": "model"},
    )
    assert hub.calls[1][0] == "create_branch"
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "tinkex.json"]
    assert sorted(hub.files) == names
    told = json.loads(hub.files["tinkex.json"])
    assert (told["base_fingerprint"], told["has_optimizer"]) == ("0123456789abcdef", False)
    assert "base_model: org/base" in hub.files["README.md"]
    assert not (adapter / "README.md").exists()


def test_a_push_takes_patterns_and_can_leave_the_card_out(adapter):
    hub = RecordingHub()
    downloads.push_to_hub(
        adapter, "me/x", api=hub, public=True, model_card=False, allow_patterns=["adapter_*"]
    )
    assert hub.calls[0][1]["private"] is False
    assert sorted(hub.files) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_folder_that_is_no_adapter_is_not_pushed(tmp_path):
    with pytest.raises(InvalidInputError, match="not a PEFT adapter"):
        downloads.push_to_hub(tmp_path, "me/x", api=RecordingHub())


# --------------------------------------------------------------------------------------- progress


class Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize("tty", [True, False])
def test_a_bar_is_drawn_only_where_a_person_looks(tty):
    stream = Stream(tty)
    with downloads.progress_bar("Downloading", stream=stream) as on_progress:
        on_progress(5, 10)
    assert ("Downloading" in stream.getvalue()) is tty


def test_a_folder_is_named_after_run_kind_and_name():
    name = downloads.folder_name("tinker://s-1:train:0/weights/step-5")
    assert name == "s-1_train_0_weights_step-5"


def test_a_push_without_a_network_is_told_in_words(adapter):
    """Through the hub's own library, whichever HTTP library it uses by now."""
    from huggingface_hub import HfApi

    nowhere = HfApi(endpoint="http://127.0.0.1:9", token="hf_x")
    with pytest.raises(HubError, match="'me/thing' was not pushed: .*Check the network"):
        downloads.push_to_hub(adapter, "me/thing", api=nowhere)

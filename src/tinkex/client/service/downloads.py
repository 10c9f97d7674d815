"""Bring a checkpoint to this machine, or to the Hugging Face hub.

A Tinkex server gives a checkpoint as one archive; the hosted service gives files of an export,
which is made for the purpose and removed again. A broken download goes on where it stopped, and
the folder appears whole or not at all. An archive is a stranger's file: only plain files inside
the folder are unpacked.

A bar is shown where a person waits (`progress_bar`, on a terminal) and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tinkex.client.validation import check_tinker_path
from tinkex.contract.cost import Cost
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    ConfigError,
    HubError,
    InvalidInputError,
    NotSupportedError,
    TinkerError,
    how_to_install,
    status_error_class,
)
from tinkex.wire import tar
from tinkex.wire.loopback import DIRECT

if TYPE_CHECKING:
    from tinkex.client.service.service_client import ServiceClient

OnProgress = Callable[[int, int | None], None]
"""Called with (bytes so far, bytes in all or None while unknown)."""

_MAX_FILES = 10_000
"""Most files and folders of an archive."""
_MAX_RATIO = 20
"""How much larger than the archive its files may be; weights hardly compress."""
_EXPORT_TTL_S = 3600
_HUB_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# What resumes a run is no use to those who load an adapter, and twice its size.
_NOT_FOR_THE_HUB = ("optimizer*", "gradients*", "*.part")
_MANIFEST = "tinkex.json"


def folder_name(tinker_path: str) -> str:
    """`<run>_<kind>_<name>`: what a downloaded checkpoint's folder is called."""
    run, checkpoint = check_tinker_path(tinker_path)
    return f"{run}/{checkpoint}".replace("/", "_").replace(":", "_")


def download_checkpoint(
    service: ServiceClient,
    tinker_path: str,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> int:
    """Download a checkpoint into `folder`, a new PEFT folder. Waits; returns its size in bytes.

    Call it again after a failure: an archive goes on where it stopped.

    Raises:
        InvalidInputError: The folder exists and `force` is not given, or the archive is unsafe.
        NotFoundError: No such checkpoint, or not yours.
    """
    target = Path(folder)
    if target.exists() and not force:
        raise InvalidInputError(
            f"{target} exists. Choose another folder, or force=True to replace it.", path="folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    rest = service.create_rest_client()
    try:
        archive = rest.get_checkpoint_archive_url_from_tinker_path(tinker_path).result()
    except APIStatusError as exc:
        if exc.status_code not in (404, 405, 501):
            raise
        return _download_files(service, tinker_path, target, on_progress)
    part = target.with_name(f".{target.name}.tar.part")
    fetch(archive.url, part, on_progress=on_progress)
    try:
        with _aside(target) as scratch:
            extract_archive(part, scratch)
    finally:
        part.unlink()  # whole by now, so an archive that is refused will never be better
    return _size(target)


@contextlib.contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target`, replacing it, when the block ends well."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield scratch
        if target.is_dir():
            shutil.rmtree(target)
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# ----------------------------------------------------------------------- files of a hosted export


def _download_files(
    service: ServiceClient, tinker_path: str, target: Path, on_progress: OnProgress | None
) -> int:
    """The way of the hosted service: export, fetch each file, remove the export."""
    _, checkpoint = check_tinker_path(tinker_path)
    if checkpoint.startswith("external_weights/"):
        _fetch_external(service, tinker_path, target, on_progress)
        return _size(target)
    if not checkpoint.startswith("weights/"):
        raise NotSupportedError(
            f"this server gives away training checkpoints (tinker://RUN/weights/NAME) and exports "
            f"only, got {tinker_path!r}. Save the state with save_state and download that.",
            path="tinker_path",
        )
    trainer = service.create_training_client_from_state(tinker_path).result()
    export = trainer.save_weights_external("download", ttl_seconds=_EXPORT_TTL_S).result()
    try:
        _fetch_external(service, export.path, target, on_progress)
    finally:
        service.create_rest_client().delete_checkpoint_from_tinker_path(export.path).result()
    return _size(target)


def _fetch_external(
    service: ServiceClient, path: str, target: Path, on_progress: OnProgress | None
) -> None:
    rest = service.create_rest_client()
    names = sorted(rest.get_external_weights_urls(path).result().urls)
    done = 0
    with _aside(target) as scratch:
        for name in names:
            file = scratch / tar.safe_name(name.encode("utf-8", "surrogatepass"))
            file.parent.mkdir(parents=True, exist_ok=True)
            # Signed addresses expire; each file asks for a fresh one.
            url = rest.get_external_weights_urls(path).result().urls[name]

            def report(so_far: int, total: int | None, before: int = done) -> None:
                if on_progress is not None:
                    on_progress(before + so_far, None)

            fetch(url, file, on_progress=report)
            done += file.stat().st_size


# ------------------------------------------------------------------------------------ one file


def fetch(
    url: str,
    target: Path,
    *,
    on_progress: OnProgress | None = None,
    tries: int = 5,
    client: httpx.Client | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Download a signed URL to `target`, going on where an earlier attempt stopped.

    The bytes so far are `target` itself; beside it lies the tag of the version they belong to, so
    a file that changed on the server starts over instead of being glued together.
    """
    owner = client or httpx.Client(
        follow_redirects=True, timeout=httpx.Timeout(60.0), mounts=DIRECT
    )
    try:
        for attempt in range(tries):
            try:
                _fetch_rest(owner, url, target, on_progress)
                _tag_file(target).unlink(missing_ok=True)
                return
            except (httpx.TransportError, _CutShortError) as exc:
                if attempt == tries - 1:
                    raise APIConnectionError(
                        f"The download broke off {tries} times, last with: {exc}. What arrived is "
                        f"in {target}; call again to go on.",
                        "GET download",
                    ) from exc
                sleep(min(0.5 * 2**attempt, 10.0))
    finally:
        if client is None:
            owner.close()


class _CutShortError(Exception):
    """The connection closed before all bytes came."""


def _tag_file(target: Path) -> Path:
    return target.with_name(target.name + ".etag")


def _fetch_rest(
    client: httpx.Client, url: str, target: Path, on_progress: OnProgress | None
) -> None:
    have = target.stat().st_size if target.is_file() else 0
    tag_file = _tag_file(target)
    tag = tag_file.read_text() if tag_file.is_file() else ""
    headers = {"Accept-Encoding": "identity"}
    if have and tag:
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == 416 and have:
            target.unlink()  # what we have is longer than the file is now
            raise _CutShortError("the server has another version")
        if answer.status_code >= 400:
            raise status_error_class(answer.status_code)(
                f"The download was refused with {answer.status_code}. The address may have "
                "expired; ask for a new one.",
                status_code=answer.status_code,
                request="GET download",
            )
        if answer.status_code != 206:
            have = 0
        length = answer.headers.get("content-length")
        total = None if length is None else have + int(length)
        tag_file.write_text(answer.headers.get("etag", ""))
        with target.open("ab" if have else "wb") as file:
            # Written as they come: a chunker would throw away what it held when the line breaks.
            for chunk in answer.iter_raw():
                file.write(chunk)
                have += len(chunk)
                if on_progress is not None:
                    on_progress(have, total)
    if total is not None and have != total:
        raise _CutShortError(f"{have} of {total} bytes came")


# ----------------------------------------------------------------------------------------- archive


def extract_archive(archive: Path, folder: Path, *, max_bytes: int | None = None) -> list[Path]:
    """Unpack a tar, plain or gzipped, into `folder`: plain files only, all of them inside it.

    Args:
        max_bytes: Most bytes to write; by default in proportion to the archive.

    Raises:
        InvalidInputError: A member is absolute, climbs out, is a link or device, has holes, or
            comes twice, or the archive is too large or damaged. Nothing of it should be used then.
    """
    most = _MAX_RATIO * archive.stat().st_size if max_bytes is None else max_bytes
    limit = Cost(files=_MAX_FILES, sent_bytes=most, depth=tar.MAX_DEPTH)
    with archive.open("rb") as stream:
        return tar.extract(tar.members(tar.unpacked(stream), limit), folder, limit)


# ------------------------------------------------------------------------------------------- hub


def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = None,
    model_card: bool = True,
    api: Any = None,
) -> str:
    """Push a PEFT folder to the Hugging Face hub; returns the address of the commit.

    Optimizer state stays here; the fingerprint of the base weights goes along. Needs
    huggingface_hub and a token of yours (`hf auth login`).

    Args:
        api: A `huggingface_hub.HfApi`; made from your stored token by default.
    """
    source = Path(folder)
    config = source / "adapter_config.json"
    if not config.is_file() or not any((source / name).is_file() for name in _HUB_FILES):
        raise InvalidInputError(
            f"{source} is not a PEFT adapter: it needs adapter_config.json and "
            f"{' or '.join(_HUB_FILES)}.",
            path="folder",
        )
    hub = _hub_api() if api is None else api
    with _told_in_words(repo_id), _for_the_hub(source, repo_id, card=model_card) as upload:
        hub.create_repo(repo_id, private=not public, exist_ok=True, repo_type="model")
        if revision is not None and not create_pr:
            hub.create_branch(repo_id, branch=revision, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repo_id,
            folder_path=str(upload),
            revision=revision,
            commit_message=commit_message or "Upload adapter with tinkex",
            create_pr=create_pr,
            allow_patterns=list(allow_patterns) if allow_patterns else None,
            ignore_patterns=[*_NOT_FOR_THE_HUB, *(ignore_patterns or ())],
        )
    return str(getattr(done, "commit_url", done))


@contextlib.contextmanager
def _told_in_words(repo_id: str) -> Iterator[None]:
    """Turn what the hub's library and its HTTP library raise into one error of ours."""
    try:
        yield
    except (TinkerError, KeyboardInterrupt):
        raise
    except Exception as exc:
        kind = type(exc)
        # Which HTTP library the hub's uses changes with its version; Python's own errors are ours.
        if kind.__module__ == "builtins" and not isinstance(exc, OSError):
            raise
        reason = next(
            (line.strip() for line in str(exc).splitlines() if line.strip()), kind.__name__
        )
        raise HubError(
            f"{repo_id!r} was not pushed: {reason[:300]}. Check the network and your token "
            "(`hf auth login`), then run it again; the checkpoint itself is untouched."
        ) from exc


def _hub_api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as exc:
        raise ConfigError(f"Pushing needs huggingface_hub: {how_to_install('hub')}.") from exc
    return HfApi()


@contextlib.contextmanager
def _for_the_hub(source: Path, repo_id: str, *, card: bool) -> Iterator[Path]:
    """Links to the files of a folder, a generated README.md where it has none, and its manifest."""
    with tempfile.TemporaryDirectory(prefix="tinkex-push-") as scratch:
        folder = Path(scratch)
        for file in source.iterdir():
            if file.name != _MANIFEST:
                (folder / file.name).symlink_to(file.resolve())
        if card and not (folder / "README.md").exists():
            (folder / "README.md").write_text(_card(source, repo_id), encoding="utf-8")
        if (manifest := _manifest(source / _MANIFEST)) is not None:
            (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        yield folder


def _manifest(file: Path) -> dict[str, Any] | None:
    """The adapter's manifest (fingerprint of its base and so on), or None if it has none."""
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    return {**manifest, "has_optimizer": False, "has_gradients": False}  # they stay here


def _card(source: Path, repo_id: str) -> str:
    config = json.loads((source / "adapter_config.json").read_text("utf-8"))
    base = config.get("base_model_name_or_path") or "unknown"
    header = f"---\nbase_model: {base}\nlibrary_name: peft\ntags:\n- lora\n- tinkex\n---\n"
    return (
        f"{header}\n# {repo_id.rpartition('/')[2]}\n\nA LoRA adapter (rank {config.get('r', '?')}) "
        f"for `{base}`, trained with Tinkex.\n\n```python\nfrom peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
        f'model = PeftModel.from_pretrained(base, "{repo_id}")\n```\n'
    )


# -------------------------------------------------------------------------------------- progress


@contextlib.contextmanager
def progress_bar(description: str, *, stream: Any = None) -> Iterator[OnProgress]:
    """An `on_progress` that draws a bar on stderr if that is a terminal, and nothing otherwise."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield lambda so_far, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(file=out)) as progress:
        task = progress.add_task(description, total=None)
        yield lambda so_far, total: progress.update(task, completed=so_far, total=total)

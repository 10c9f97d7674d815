"""Folders in an S3 bucket: put one, get one, remove one, and say which are there whole.

The files of a folder `a/b` lie under `<prefix>/a/b/`, and `<prefix>/a/b.files` lists them with
their sizes. The list is written after the files and removed before them, so a folder that has one
is whole. Blocks; knows objects, not checkpoints, and removes nothing that it was not told to.

`obstore` is an extra: only who has a bucket imports this module.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import orjson
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from tinkex.engine.folders import make_safe
from tinkex.errors import ConfigError, EngineError

CHUNK_BYTES = 32 << 20
LIST = ".files"
OWNER = "store.id"
_ADVICE = (
    "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the machine's role), "
    "the region from AWS_REGION, another server than Amazon's from AWS_ENDPOINT_URL."
)


class Bucket:
    def __init__(self, url: str) -> None:
        """Of `s3://bucket/prefix`; asks nothing of it yet.

        Raises:
            ConfigError: It is no such URL.
        """
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment or "@" in url:
            raise ConfigError(f"storage must be s3://BUCKET or s3://BUCKET/PREFIX, got {url!r}.")
        self.url = url.rstrip("/")
        self._name = parts.netloc
        self._prefix = parts.path.strip("/")
        self._store = self._connect(max_retries=4, timeout_s=60)

    def _connect(self, *, max_retries: int, timeout_s: int) -> S3Store:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        try:
            return S3Store(
                self._name,
                prefix=self._prefix or None,
                client_options={
                    "timeout": timedelta(seconds=timeout_s),
                    "connect_timeout": timedelta(seconds=5),
                    "allow_http": bool(endpoint and endpoint.startswith("http://")),
                },
                retry_config={
                    "max_retries": max_retries,
                    "retry_timeout": timedelta(seconds=3 * timeout_s),
                },
                **options,
            )
        except BaseError as exc:
            raise ConfigError(f"cannot use {self.url}: {_first_line(exc)}. {_ADVICE}") from exc

    # ------------------------------------------------------------------------ at the start

    def check(self) -> None:
        """Write, read and remove a small object.

        Raises:
            ConfigError: One of these does not work; the text says why.
        """
        store = self._connect(max_retries=1, timeout_s=10)
        probe, text = f".probe-{secrets.token_hex(8)}", b"tinkex"
        try:
            obstore.put(store, probe, text)
            content = bytes(obstore.get(store, probe).bytes())
            obstore.delete(store, probe)
        except (BaseError, FileNotFoundError) as exc:
            raise ConfigError(f"cannot use {self.url}: {_in_words(exc)} {_ADVICE}") from exc
        if content != text:
            raise ConfigError(f"{self.url} gave back other bytes than were put there.")

    def bind(self, store_id: str) -> None:
        """Make it the storage of one database.

        Raises:
            ConfigError: Another one's checkpoints are here.
        """
        try:
            obstore.put(self._store, OWNER, store_id.encode(), mode="create")
        except AlreadyExistsError:
            owner = bytes(obstore.get(self._store, OWNER).bytes()).decode(errors="replace")
            if owner != store_id:
                raise ConfigError(
                    f"{self.url} holds the checkpoints of the database with the id {owner[:80]!r}, "
                    f"and this one has the id {store_id!r}. Nothing was touched. Give each server "
                    "a prefix of its own, or the database that belongs to this one."
                ) from None

    def stored(self) -> set[str]:
        """The names of all folders that are here whole."""
        names: set[str] = set()
        for page in obstore.list(self._store):
            paths = (str(entry["path"]) for entry in page)
            names.update(path.removesuffix(LIST) for path in paths if path.endswith(LIST))
        return names

    # ------------------------------------------------------------------------ folders

    def put_folder(self, name: str, folder: Path) -> None:
        """Copy a folder of ours here. When this returns it is here whole.

        Raises:
            EngineError: It is not.
        """
        sizes: dict[str, int] = {}
        try:
            for file in sorted(f for f in folder.rglob("*") if f.is_file()):
                relative = file.relative_to(folder).as_posix()
                obstore.put(self._store, f"{name}/{relative}", file)
                sizes[relative] = file.stat().st_size
            obstore.put(self._store, f"{name}{LIST}", orjson.dumps(sizes))
        except (BaseError, FileNotFoundError) as exc:
            raise EngineError(
                f"The checkpoint could not be kept in the server's object store: {_in_words(exc)} "
                "Nothing was listed; save it again."
            ) from exc

    def get_folder(self, name: str, folder: Path) -> None:
        """Copy one of them to `folder`, which is then there whole or not at all.

        Raises:
            EngineError: It cannot be read.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            listed = orjson.loads(bytes(obstore.get(self._store, f"{name}{LIST}").bytes()))
            for relative, size in listed.items():
                target = aside / relative
                if not target.resolve().is_relative_to(aside.resolve()):
                    raise EngineError(f"{name} in the object store names a file outside itself.")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._get_file(f"{name}/{relative}", target, size)
            # A folder that is there counts as whole (`Depot.fetch`), after a power cut as well, so
            # its bytes are on the disk before it has its name.
            make_safe(aside)
            aside.chmod(0o755)
            aside.rename(folder)
        except (BaseError, FileNotFoundError) as exc:
            raise EngineError(
                f"The checkpoint cannot be read from the server's object store: {_in_words(exc)} "
                "Send the request again, or tell whoever runs the server."
            ) from exc
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _get_file(self, path: str, target: Path, size: int) -> None:
        with target.open("xb") as out:
            for start in range(0, size, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, size)
                piece = obstore.get_range(self._store, path, start=start, end=end)
                if out.write(piece) != end - start:
                    raise EngineError(f"{path} in the object store is shorter than it was.")

    def remove(self, name: str) -> bool:
        """Remove one that the database says was deleted; False when some of it is still there."""
        try:
            obstore.delete(self._store, f"{name}{LIST}")
            for page in obstore.list(self._store, prefix=f"{name}/"):
                obstore.delete(self._store, [entry["path"] for entry in page])
        except (BaseError, FileNotFoundError):  # it goes elsewhere too: the next round looks again
            return False
        return True


def _in_words(exc: Exception) -> str:
    """The failure as a person would say it; the library's own line where we know no better."""
    text = str(exc)
    for sign, words in _SIGNS:
        if sign in text:
            return words
    return f"{_first_line(exc)}."


_SIGNS = (
    ("NoSuchBucket", "there is no such bucket."),
    ("InvalidAccessKeyId", "its server does not know the access key."),
    ("SignatureDoesNotMatch", "its server does not accept the secret key."),
    ("AccessDenied", "its server does not allow it with these credentials."),
    ("Connection refused", "nobody listens at its address."),
    ("dns error", "its address is not known."),
    ("169.254.169.254", "there are no credentials."),
    ("timed out", "its server did not answer in time."),
)


def _first_line(exc: Exception) -> str:
    return str(exc).strip().splitlines()[0][:300].rstrip(".")

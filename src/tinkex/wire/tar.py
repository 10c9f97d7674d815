"""Read a tar archive that a stranger made: plain files and folders, and nothing else.

Not with `tarfile`: before Python 3.11.10 and 3.12.6 it takes the square of a header's length, with
every thread of the process waiting (CVE-2024-6232), it reads chains of headers by recursion, and it
takes what it cannot read for the end. Here work is in proportion to the bytes that came; of a
compressed archive, to the bytes that it may become, headers included.

Archives in the formats ustar, GNU and pax are read, as GNU tar, bsdtar and `tarfile` write them. Of
their extended headers names and sizes count; times, owners and attributes change neither a name nor
a byte of a file and are passed over. What would mean something else is refused: links, devices,
sparse files, volumes, names that leave the folder, numbers that are none, an archive without its
end. The stream is read forwards only, so a compressed one will do. Standard library only.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NoReturn, cast

from tinkex.contract.cost import Cost
from tinkex.errors import InvalidInputError

BLOCK = 512
MAX_EXTENDED_BYTES = 64 * 1024
"""Of one extended header: a name, times, owners and the attributes of a file."""
MAX_NAME_BYTES = 1024
MAX_DEPTH = 16
MAX_PART_BYTES = 255
"""Of a folder's or file's own name, as file systems have it."""
_CHUNK_BYTES = 1 << 20
_MAX_LENGTH_DIGITS = 6
"""Of a record in an extended header; enough for `MAX_EXTENDED_BYTES`."""
_LATEST_S = 1 << 33
"""The latest time that a file is given; file systems have no year 10000."""
_FILE, _OLD_FILE, _FOLDER = b"0", b"\0", b"5"
_PAX, _PAX_GLOBAL, _LONG_NAME, _SPARSE = b"x", b"g", b"L", b"S"
_LINKS = {
    b"1": "tar --hard-dereference",
    b"2": "tar --dereference",
    b"K": "tar --dereference --hard-dereference",
}
"""Types of links, and of the header with a link's long target, with what packs a file instead."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""How files of gzip, bzip2, xz and zstd begin."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file or folder of an archive. `name` is relative and stays inside; "" is the top folder."""

    name: str
    is_folder: bool
    size: int
    mode: int
    mtime: int


@dataclass(frozen=True, slots=True)
class _Header:
    name: bytes
    kind: bytes
    size: int
    mode: int
    mtime: int


@dataclass(slots=True)
class _Extended:
    """The facts that extended headers state of the member behind them."""

    kinds: bytes = b""
    """Of the headers, each once."""
    name: bytes | None = None
    size: int | None = None


Found = tuple[Member, Iterator[bytes]]
"""A member and its bytes, which can be read until the next member is asked for."""


def members(stream: BinaryIO, limit: Cost) -> Iterator[Found]:
    """The files and folders of a tar archive, in their order.

    Of the limit count `files`, folders and those that are only part of a file's name included;
    `sent_bytes` of all files and extended headers together; and `depth`, of folders in a name with
    the file's own.

    Raises:
        InvalidInputError: The archive is damaged or cut short, holds more than `limit`, or
            something that is neither a plain file nor a folder. What came before it was read.
    """
    extended, num_members, left = _Extended(), 0, limit.sent_bytes
    while (header := _next_header(stream)) is not None:
        if header.kind in (_PAX, _LONG_NAME):
            left = _spend(left, header.size, header.name)
            _extend(extended, header, stream)
            continue
        num_members += 1
        if num_members > limit.files:
            _refuse(header.name, f"is one of over {limit.files} files and folders")
        if header.kind == _PAX_GLOBAL:
            left = _spend(left, header.size, header.name)
            _pass_over_global(header, stream)
            continue
        member = _member(header, extended, limit)
        extended = _Extended()
        left = _spend(left, member.size, header.name)
        data = _content(stream, member)
        yield member, data
        for _ in data:  # what the caller left
            pass
    if extended.kinds:
        _damaged("its last header belongs to no file")


def extract(
    found: Iterable[Found], folder: Path, limit: Cost, *, keep_modes: bool = False
) -> list[Path]:
    """Write members into `folder`, where nothing is yet; gives the files.

    Args:
        keep_modes: Files get their time and mode, less what lets others write them or run them.

    Raises:
        InvalidInputError: As `members`, or a name comes twice. Nothing of it should be used then.
    """
    written: list[Path] = []
    folders = {folder}
    for member, data in found:
        target = folder / member.name
        if not target.is_relative_to(folder):  # a drive's letter, where there are drives
            _refuse(member.name, "does not stay inside the folder")
        try:
            _make_folders(target if member.is_folder else target.parent, folders)
            if not member.is_folder:
                _write(target, data)
                written.append(target)
        except (FileExistsError, NotADirectoryError):
            _refuse(member.name, "comes twice")
        if len(written) + len(folders) - 1 > limit.files:
            _refuse(member.name, f"is one of over {limit.files} files and folders")
        if keep_modes and not member.is_folder:
            target.chmod(_safe_mode(member.mode))
            time_s = min(member.mtime, _LATEST_S)
            os.utime(target, (time_s, time_s))
    return written


def unpacked(stream: BinaryIO) -> BinaryIO:
    """The stream, or what it holds where it is compressed with gzip."""
    start = stream.read(2)
    stream.seek(0)
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if start == b"\x1f\x8b" else stream


# ---------------------------------------------------------------------------------------- headers


def _next_header(stream: BinaryIO) -> _Header | None:
    """The next header; None at the end, which is a block of zeros."""
    block = _read(stream, BLOCK, "it ends without the zeros that mark the end")
    if not block.strip(b"\0"):
        return None
    if block.startswith(_COMPRESSED):
        _damaged("it is compressed; unpack it and send the plain tar")
    if _octal(block[148:156], "checksum") != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        _damaged("a header does not have the sum that it says")
    name = _text(block[:100])
    # GNU has times where ustar has the beginning of a long name; the oldest format has nothing.
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = prefix + b"/" + name
    return _Header(
        name=name,
        kind=block[156:157],
        size=_number(block[124:136], "size"),
        mode=_number(block[100:108], "mode"),
        # 0xff begins a time before 1970 in GNU's form; it is passed over.
        mtime=0 if block[136] == 0xFF else _number(block[136:148], "time"),
    )


def _spend(left: int, size: int, name: bytes) -> int:
    """The bytes that the archive may still become, after `size` of them."""
    if size > left:
        _refuse(name, "makes the archive larger than it may become")
    return left - size


def _member(header: _Header, extended: _Extended, limit: Cost) -> Member:
    name = header.name if extended.name is None else extended.name
    size = header.size if extended.size is None else extended.size
    kind = header.kind
    if kind == _OLD_FILE and name.endswith(b"/"):
        kind = _FOLDER
    if kind == _SPARSE:
        _refuse(name, "has holes (a sparse file); pack it without --sparse")
    if kind in _LINKS:
        _refuse(name, f"is a link, not a plain file or folder; pack it as a file ({_LINKS[kind]})")
    if kind not in (_FILE, _OLD_FILE, _FOLDER):
        _refuse(name, f"is not a plain file or folder (its type is {_shown(kind)}); leave it out")
    is_folder = kind == _FOLDER
    if is_folder and size:
        _refuse(name, f"is a folder with a size of {size}")
    path = safe_name(name, is_folder=is_folder, max_depth=limit.depth)
    return Member(path, is_folder, size, header.mode, header.mtime)


def _extend(extended: _Extended, header: _Header, stream: BinaryIO) -> None:
    """Take a header for the next member in: a long name, or records."""
    if header.kind in extended.kinds:
        _damaged("it has two extended headers for one file")
    extended.kinds += header.kind
    body = _body(header, stream)
    if header.kind == _LONG_NAME:
        _set_name(extended, _text(body))
        return
    for key, value in _records(body):
        if key == b"path":
            _set_name(extended, value)
        elif key == b"size":
            if not value.isdigit() or len(value) > 19:
                _damaged(f"a size is {_shown(value)}")
            extended.size = int(value)
        elif key.startswith(b"GNU.sparse."):
            _refuse(
                extended.name or b"a file", "has holes (a sparse file); pack it without --sparse"
            )
        elif key.startswith(b"GNU."):
            _refuse(key, "is a record that changes what a file means")


def _set_name(extended: _Extended, name: bytes) -> None:
    if extended.name is not None and extended.name != name and len(extended.kinds) > 1:
        _damaged("it has two names for one file")
    extended.name = name


def _pass_over_global(header: _Header, stream: BinaryIO) -> None:
    """Check that a header for all files says nothing about their names and bytes."""
    for key, _ in _records(_body(header, stream)):
        if key in (b"path", b"size", b"linkpath") or key.startswith(b"GNU."):
            _refuse(key, "is a record for one file, and stands for all of them")


def _body(header: _Header, stream: BinaryIO) -> bytes:
    if header.size > MAX_EXTENDED_BYTES:
        _damaged(
            f"an extended header has {header.size} bytes, at most {MAX_EXTENDED_BYTES} go; pack it "
            "without the files' attributes (tar --no-xattrs --no-acls)"
        )
    body = _read(stream, header.size, "it is cut short in a header")
    _read(stream, -header.size % BLOCK, "it is cut short in a header")
    return body


def _records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records `LENGTH KEY=VALUE` of an extended header, read from left to right."""
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + _MAX_LENGTH_DIGITS + 1)
        length = body[at : max(space, at)]
        end = at + int(length) if length.isdigit() else 0
        key, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not (space + 1 < end <= len(body) and body[end - 1 : end] == b"\n" and key and equals):
            _damaged("a record of an extended header is none")
        yield key, value
        at = end


# ----------------------------------------------------------------------------------------- values


def _number(field: bytes, what: str) -> int:
    """A number in octal, or in the 256-ary form that GNU has for large ones."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return _octal(field, what)


def _octal(field: bytes, what: str) -> int:
    digits = _text(field).strip(b" ")
    if digits.strip(b"01234567"):
        _damaged(f"a {what} is {_shown(digits)}")
    return int(digits or b"0", 8)


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def safe_name(name: bytes, *, is_folder: bool = False, max_depth: int = MAX_DEPTH) -> str:
    """A stranger's name of a file or folder, as a relative path that stays where it is put.

    Raises:
        InvalidInputError: It is absolute, climbs out, is too long or too deep, or no plain text.
    """
    if len(name) > MAX_NAME_BYTES:
        _refuse(name, f"has a name of {len(name)} bytes, at most {MAX_NAME_BYTES} go")
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        _refuse(name, "has a name that is not UTF-8")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        _refuse(name, "has a name with control characters")
    path = PurePosixPath(text)
    is_top = is_folder and text.rstrip("/") == "."
    if path.is_absolute() or ".." in path.parts or "\\" in text or not (path.parts or is_top):
        _refuse(name, "does not stay inside the folder")
    if not is_folder and text.endswith("/"):
        _refuse(name, "is a file with the name of a folder")
    if len(path.parts) > max_depth:
        _refuse(name, f"lies {len(path.parts)} folders deep, at most {max_depth} go")
    if any(len(part.encode()) > MAX_PART_BYTES for part in path.parts):
        _refuse(name, f"has a part of over {MAX_PART_BYTES} bytes")
    return "" if is_top else str(path)


def _safe_mode(mode: int) -> int:
    """The mode that a restored file may have, as the filter `data` of `tarfile` has it."""
    runs = 0o111 if mode & 0o100 else 0
    return mode & (0o644 | runs) | 0o600


# ------------------------------------------------------------------------------------------ bytes


def _content(stream: BinaryIO, member: Member) -> Iterator[bytes]:
    left = member.size
    while left:
        piece = _read_some(stream, min(left, _CHUNK_BYTES))
        if not piece:
            _damaged(f"it is cut short in {_shown(member.name)}")
        left -= len(piece)
        yield piece
    _read(stream, -member.size % BLOCK, f"it is cut short in {_shown(member.name)}")


def _read(stream: BinaryIO, count: int, trouble: str) -> bytes:
    pieces = []
    while count:
        piece = _read_some(stream, count)
        if not piece:
            _damaged(trouble)
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _read_some(stream: BinaryIO, count: int) -> bytes:
    try:
        return stream.read(count)
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise InvalidInputError(f"not a whole tar archive: {exc}.", path="archive") from exc


def _make_folders(folder: Path, known: set[Path]) -> None:
    if folder not in known:
        _make_folders(folder.parent, known)
        folder.mkdir()
        known.add(folder)


def _write(target: Path, data: Iterable[bytes]) -> None:
    with target.open("xb") as out:
        for piece in data:
            out.write(piece)


def _shown(name: bytes | str) -> str:
    text = name if isinstance(name, str) else name.decode("utf-8", "replace")
    return repr(text[:120])


def _refuse(name: bytes | str, why: str) -> NoReturn:
    raise InvalidInputError(f"{_shown(name)} {why}; nothing was kept.", path="archive")


def _damaged(why: str) -> NoReturn:
    raise InvalidInputError(f"not a whole tar archive: {why}.", path="archive")

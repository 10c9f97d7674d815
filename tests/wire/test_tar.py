"""Our reader of tar archives agrees with `tarfile` on what programs write, and refuses the rest."""

from __future__ import annotations

import contextlib
import gzip
import io
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.contract.cost import Cost
from tinkex.errors import InvalidInputError
from tinkex.wire import tar

LIMITS = Cost(files=100, sent_bytes=1 << 20, depth=tar.MAX_DEPTH)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
DIGITS = b"1" * 200_000
PARTS = st.text(
    st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/\\"),
    min_size=1,
    max_size=60,
).filter(lambda part: part not in (".", "..") and len(part.encode()) <= 255)
NAMES = st.lists(PARTS, min_size=1, max_size=5).map("/".join)
TIMES = st.one_of(st.integers(-(2**33), 2**33), st.floats(-(2**33), 2**33))


def read(body: bytes, limits: Cost = LIMITS) -> list[tuple[str, bool, bytes]]:
    found = tar.members(io.BytesIO(body), limits)
    return [(member.name, member.is_folder, b"".join(data)) for member, data in found]


def header(kind: bytes, body: bytes = b"", name: bytes = b"x", **fields: bytes) -> bytes:
    """One header of a type, and what follows it."""
    block = bytearray(512)
    places = {"name": 0, "mode": 100, "size": 124, "mtime": 136, "type": 156, "magic": 257}
    values = {"name": name, "mode": b"644", "size": b"%o" % len(body), "type": kind}
    for field, value in (values | {"magic": b"ustar\00000"} | fields).items():
        block[places[field] : places[field] + len(value)] = value
    block[148:156] = b"%06o\0 " % (sum(block) + 8 * 32)
    return bytes(block) + body + bytes(-len(body) % 512)


def record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    length += len(str(length + len(str(length))))
    return b"%d %s=%s\n" % (length, key, value)


END = bytes(1024)
FILE = header(b"0", b"abc")


REFUSED = [
    (header(b"x", DIGITS) + FILE + END, "an extended header has 200000 bytes"),
    (header(b"g", DIGITS) + FILE + END, "an extended header has 200000 bytes"),
    (header(b"x", DIGITS[:60_000]) + FILE + END, "a record of an extended header is none"),
    (header(b"x", b"5 a=b\n") + FILE + END, "a record of an extended header is none"),
    (header(b"x", b"99 a=b\n") + FILE + END, "a record of an extended header is none"),
    (header(b"x", b"0 a=b\n") + FILE + END, "a record of an extended header is none"),
    (header(b"x", b" a=b\n") + FILE + END, "a record of an extended header is none"),
    (header(b"x", record(b"size", b"-1")) + FILE + END, "a size is '-1'"),
    (header(b"x", record(b"size", b"9" * 30)) + FILE + END, "a size is '999"),
    (header(b"x", record(b"path", b"../up")) + FILE + END, "does not stay inside"),
    (header(b"x", record(b"path", b"")) + FILE + END, "does not stay inside"),
    (header(b"x", record(b"GNU.sparse.map", b"0,1")) + FILE + END, "sparse"),
    (header(b"x", record(b"GNU.volume.size", b"1")) + FILE + END, "changes what a file means"),
    (header(b"g", record(b"path", b"all")) + FILE + END, "stands for all of them"),
    (header(b"x", record(b"a", b"b")) * 2 + FILE + END, "two extended headers"),
    (header(b"L", b"n\0") * 3000 + FILE + END, "two extended headers"),
    (header(b"L", b"n\0") + header(b"x", record(b"path", b"m")) + FILE + END, "two names"),
    (header(b"L", b"n\0") + END, "belongs to no file"),
    (header(b"g", record(b"a", b"b")) * 101 + FILE + END, "over 100 files and folders"),
    (FILE * 101 + END, "over 100 files and folders"),
    (header(b"K", b"n\0") + FILE + END, "not a plain file"),
    (header(b"1") + END, "tar --hard-dereference"),
    (header(b"2") + END, "tar --dereference"),
    (header(b"V") + END, "its type is 'V'"),
    (header(b"S") + END, "sparse"),
    *((header(b"%c" % kind) + END, "not a plain file") for kind in b"123467MVDNAX"),
    (header(b"5", size=b"7") + END, "a folder with a size"),
    (header(b"0", name=b"a/") + END, "the name of a folder"),
    (header(b"0", name=b"/abs") + END, "does not stay inside"),
    (header(b"0", name=b"a/../../b") + END, "does not stay inside"),
    (header(b"0", name=b"a\\b") + END, "does not stay inside"),
    (header(b"0", name=b".") + END, "does not stay inside"),
    (header(b"0", name=b"a\x1b[2J") + END, "control characters"),
    (header(b"0", name=b"\xff") + END, "not UTF-8"),
    (header(b"0", name=b"a/" * 17 + b"a") + END, "18 folders deep"),
    (header(b"L", b"n" * 256 + b"\0") + FILE + END, "over 255 bytes"),
    (header(b"L", b"n/" * 600 + b"\0") + FILE + END, "a name of 1200 bytes"),
    (header(b"0", size=b"\xff" * 12) + END, "a size is"),
    (header(b"0", size=b"0o17") + END, "a size is '0o17'"),
    (header(b"0", size=b"1_7") + END, "a size is '1_7'"),
    (header(b"0", size=b"\x80" + b"\xff" * 11) + END, "larger than it may become"),
    (header(b"0", size=b"77777777777") + END, "larger than it may become"),
    (header(b"0", b"abc", size=b"7000") + END, "cut short in 'x'"),
    (FILE, "without the zeros"),
    (b"", "without the zeros"),
    (FILE[:300], "without the zeros"),
    (b"garbage " * 200, "is"),
    (FILE.replace(b"x", b"y", 1) + END, "does not have the sum"),
    (gzip.compress(Random(0).randbytes(2000), mtime=0), "compressed"),
    (b"\x28\xb5\x2f\xfd" + Random(0).randbytes(2000), "compressed"),
]


@given(
    files=st.lists(st.tuples(NAMES, st.binary(max_size=1500), TIMES), max_size=6),
    folders=st.lists(NAMES, max_size=3),
    kind=st.sampled_from(sorted(FORMATS)),
    owner=st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_what_tarfile_writes_is_read_as_tarfile_reads_it(files, folders, kind, owner):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[kind]) as archive:
        for name, content, mtime in [*files, *((name, None, 0) for name in folders)]:
            info = tarfile.TarInfo(name)
            info.uname, info.mtime = owner, mtime if kind == "pax" else int(mtime)
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            info.size = len(content or b"")
            try:
                archive.addfile(info, io.BytesIO(content or b""))
            except ValueError:  # a name or a time that ustar has no room for
                continue
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        expected = [
            (m.name, m.isdir(), b"" if m.isdir() else archive.extractfile(m).read())
            for m in archive
        ]
    assert read(out.getvalue()) == expected


@given(damage=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_damage_is_refused_in_words_or_changes_nothing_else(damage):
    body = bytearray(
        header(b"x", record(b"path", b"long")) + FILE + header(b"L", b"l\0") + FILE + END
    )
    for at, byte in damage:
        body[at % len(body)] = byte
    with contextlib.suppress(InvalidInputError):
        found = read(bytes(body))
        assert sum(len(content) for _, _, content in found) <= len(body)


@pytest.mark.parametrize("flags", [["--format=gnu"], ["--format=ustar"], ["--format=pax"], ["-z"]])
@pytest.mark.parametrize("inside", [True, False])
def test_what_gnu_tar_packs_is_unpacked(tmp_path, flags, inside):
    """As people pack an adapter: its folder, or what is in it (which names the folder `./`)."""
    if shutil.which("tar") is None:
        pytest.skip("no tar program here")
    source, out = tmp_path / "adapter", tmp_path / "out"
    (source / "more").mkdir(parents=True)
    out.mkdir()
    names = ["adapter_config.json", "more/" + "n" * 90, "more/\u00e9"]
    for name in names:
        (source / name).write_bytes(name.encode() * 100)
    at = [str(source), "."] if inside else [str(tmp_path), "adapter"]
    subprocess.run(["tar", "-cf", str(tmp_path / "a"), *flags, "-C", *at], check=True)
    with (tmp_path / "a").open("rb") as stream:
        tar.extract(tar.members(tar.unpacked(stream), LIMITS), out, LIMITS)
    root = out if inside else out / "adapter"
    assert {name: (root / name).read_bytes() for name in names} == {
        name: name.encode() * 100 for name in names
    }


def test_names_and_sizes_of_extended_headers_count():
    body = header(b"x", record(b"path", "\u00e9/b".encode()) + record(b"size", b"3"))
    body += header(b"0", b"abc", size=b"0") + header(b"g", record(b"comment", b"c"))
    body += header(b"L", b"long/" + b"n" * 200 + b"\0") + FILE
    body += header(b"0", b"abc", size=b"\x80" + bytes(10) + b"\x03")
    body += header(b"\0", name=b"old/") + header(b"0", b"abc", name=b"./here")
    assert read(body + END) == [
        ("\u00e9/b", False, b"abc"),
        ("long/" + "n" * 200, False, b"abc"),
        ("x", False, b"abc"),
        ("old", True, b""),
        ("here", False, b"abc"),
    ]


@pytest.mark.parametrize(("body", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_what_could_mean_something_else_is_refused(body, word):
    started = time.thread_time()
    with pytest.raises(InvalidInputError) as caught:
        read(body)
    assert word in str(caught.value)
    assert time.thread_time() - started < 10  # `tarfile` took 51 s over the first one


def test_folders_that_names_imply_are_counted(tmp_path):
    deep = b"".join(header(b"0", name=b"%d/a/b/c/d/e" % n) for n in range(20))
    with pytest.raises(InvalidInputError, match="over 100 files and folders"):
        tar.extract(tar.members(io.BytesIO(deep + END), LIMITS), tmp_path, LIMITS)
    assert sum(path.is_dir() for path in tmp_path.rglob("*")) < 110


@pytest.mark.parametrize("second", [header(b"0", name=b"x/y"), header(b"5"), FILE])
def test_a_name_comes_once(tmp_path: Path, second: bytes) -> None:
    with pytest.raises(InvalidInputError, match="comes twice"):
        tar.extract(tar.members(io.BytesIO(FILE + second + END), LIMITS), tmp_path, LIMITS)


def test_a_compressed_archive_becomes_no_more_than_it_may(tmp_path):
    body = gzip.compress(header(b"0", bytes(LIMITS.sent_bytes)) + header(b"0", b"1", b"y") + END)
    assert len(body) < 5000
    with pytest.raises(InvalidInputError, match="larger than it may become"):
        tar.extract(tar.members(tar.unpacked(io.BytesIO(body)), LIMITS), tmp_path, LIMITS)
    cut, out = io.BytesIO(body[: len(body) // 2]), tmp_path / "cut"
    out.mkdir()
    with pytest.raises(InvalidInputError, match="not a whole tar archive"):
        tar.extract(tar.members(tar.unpacked(cut), LIMITS), out, LIMITS)


@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_headers_count_among_what_a_compressed_archive_may_become(tmp_path, kind):
    """Records of 5 bytes cost far more to read than they weigh under gzip."""
    records = header(kind, record(b"a", b"") * 13_000)
    many = b"".join(records + header(b"0", name=b"%d" % n) for n in range(30))
    stream = io.BytesIO(gzip.compress(many + END))
    with pytest.raises(InvalidInputError, match="larger than it may become"):
        tar.extract(tar.members(tar.unpacked(stream), LIMITS), tmp_path, LIMITS)
    assert sum(1 for _ in tmp_path.iterdir()) <= LIMITS.sent_bytes // 65_000


def test_a_restored_file_has_its_mode_and_time_but_nothing_for_others(tmp_path):
    body = header(b"0", name=b"a", mode=b"0600", mtime=b"7777")
    body += header(b"0", name=b"b", mode=b"7777", mtime=b"\x80" + b"\xff" * 11)
    tar.extract(tar.members(io.BytesIO(body + END), LIMITS), tmp_path, LIMITS, keep_modes=True)
    one, two = (tmp_path / "a").stat(), (tmp_path / "b").stat()
    assert (one.st_mode & 0o7777, int(one.st_mtime)) == (0o600, 0o7777)
    assert two.st_mode & 0o7777 == 0o755

"""Tar archives that cost more than they show."""

from __future__ import annotations

import io
import tarfile


def plain(*files: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sparse(name: str, real_bytes: int) -> bytes:
    """One old-style GNU sparse file: 512 bytes at the end of a hole of `real_bytes`."""
    header = bytearray(512)
    fields = {
        0: name.encode(),
        100: b"0000644\0",
        108: b"0000000\0",
        116: b"0000000\0",
        124: b"%011o\0" % 512,
        136: b"%011o\0" % 0,
        148: b" " * 8,
        156: b"S",
        257: b"ustar  \0",
        386: b"%011o\0" % (real_bytes - 512),
        398: b"%011o\0" % 512,
        483: b"%011o\0" % real_bytes,
    }
    for at, value in fields.items():
        header[at : at + len(value)] = value
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"x" * 512 + bytes(1024)


def header(kind: bytes, body: bytes = b"", name: bytes = b"x") -> bytes:
    """One header of a type, and what follows it."""
    block = bytearray(512)
    fields = {0: name, 100: b"0000644\0", 124: b"%011o\0" % len(body), 156: kind}
    for at, value in (fields | {257: b"ustar\00000"}).items():
        block[at : at + len(value)] = value
    block[148:156] = b"%06o\0 " % (sum(block) + 8 * ord(" "))
    return bytes(block) + body + bytes(-len(body) % 512)


def digits(num_bytes: int) -> bytes:
    """An archive that begins with an extended header of nothing but digits (CVE-2024-6232)."""
    return header(b"x", b"1" * num_bytes) + plain(("adapter_config.json", b"{}"))


def chained_names(count: int) -> bytes:
    """An archive whose only file has that many long names, one behind the other."""
    return header(b"L", b"name\0") * count + plain(("adapter_config.json", b"{}"))


def folders(count: int) -> bytes:
    return b"".join(header(b"5", name=b"%d/" % n) for n in range(count)) + bytes(1024)

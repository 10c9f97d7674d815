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

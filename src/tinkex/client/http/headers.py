"""The headers of contract 1.4, computed once per process.

`CONTRACT_VERSION` is the SDK generation whose wire we speak, and is what servers gate on; our own
version travels beside it in `X-Tinkex-Version`.
"""

from __future__ import annotations

import platform
import sys
import uuid
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from tinkex.wire.generation import JSON

CONTRACT_VERSION = "0.36.0"

_SYSTEMS = {"darwin": "MacOS", "linux": "Linux", "windows": "Windows", "freebsd": "FreeBSD"}
_SYSTEMS["openbsd"] = "OpenBSD"
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64", "arm": "arm"}
_MACHINES |= {"i386": "x32", "i686": "x32", "x86": "x32"}


def _system() -> str:
    name = platform.system()
    return _SYSTEMS.get(name.lower(), f"Other:{name}" if name else "Unknown")


def _machine() -> str:
    name = platform.machine().lower()
    return _MACHINES.get(name, f"other:{name}" if name else "unknown")


@cache
def standard_headers() -> MappingProxyType[str, str]:
    """The headers of every request, credential and per-call headers excepted."""
    import tinkex

    return MappingProxyType(
        {
            "Accept": JSON,
            "Accept-Encoding": "gzip, deflate, zstd",
            "User-Agent": f"AsyncTinker/Python {CONTRACT_VERSION}",
            "X-Stainless-Package-Version": CONTRACT_VERSION,
            "X-Stainless-OS": _system(),
            "X-Stainless-Arch": _machine(),
            "X-Stainless-Runtime": platform.python_implementation(),
            "X-Stainless-Runtime-Version": ".".join(map(str, sys.version_info[:3])),
            "X-Stainless-Async": "async:asyncio",
            "X-Tinkex-Version": tinkex.__version__,
        }
    )


def idempotency_key() -> str:
    return f"stainless-python-retry-{uuid.uuid4()}"


def put(headers: dict[str, str], given: Mapping[str, str]) -> None:
    """Set headers over those that are there; a name is the same name in any case."""
    for name, value in given.items():
        if name not in headers:
            folded = name.lower()
            name = next((known for known in headers if known.lower() == folded), name)
        headers[name] = value

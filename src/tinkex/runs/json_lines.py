"""The files of a run's folder: JSON objects, one a line, and small files that are whole or absent.

A line counts once its end is written: the last one may have been cut short by a crash, and is then
left out. Knows nothing of what the lines say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["append", "keep", "read", "write_whole"]


def append(file: Path, record: Mapping[str, Any]) -> None:
    """Add one line, at once: a crash loses nothing that was reported."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The objects, one after the other as a file may be large; none where there is no file."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n") and not line.isspace():
                yield json.loads(line)


def keep(file: Path, is_wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the other lines, such as those of steps that will be trained again."""
    if file.exists():
        write_whole(file, (json.dumps(line) + "\n" for line in read(file) if is_wanted(line)))


def write_whole(file: Path, parts: Iterable[str]) -> None:
    """Write aside, then rename: a crash leaves the old file or the new one, never half of one."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as out:
        out.writelines(parts)
    aside.replace(file)

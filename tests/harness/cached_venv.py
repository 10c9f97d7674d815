"""Virtual environments with foreign packages, made on demand and kept in the cache folder.

They lie in `$TINKEX_CACHE/venvs` (default `~/.cache/tinkex/venvs`), one per name and Python; `make
clean-cache` removes them. torch, which most of these packages want and which is larger than all
else, is lent by the environment that runs the tests, never downloaded again. A lock per name lets
several test processes ask at once; a half-built environment is completed, never removed, since
another process may use it. This module does not know what the packages do.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
BUILD_TIMEOUT_S = 1500
_VERSION = "{}.{}".format(*sys.version_info)
# Folders that go with torch's own: what a CUDA build brings along, which has to come from the same
# place, and what nothing but torch needs.
_WITH_TORCH = ("nvidia", "triton", "sympy", "mpmath", "networkx")
_NEED_OF_TORCH = re.compile(r"nvidia|cuda|triton|sympy|networkx")


def cache_dir() -> Path:
    """The cache folder of Tinkex, where `make clean-cache` finds it."""
    # Resolved: in a test `~/.cache` is a link, and an environment keeps the path it was made at.
    return Path(os.environ.get("TINKEX_CACHE", "~/.cache/tinkex")).expanduser().resolve()


def cached_python(name: str, *installs: Sequence[str]) -> Path:
    """The interpreter of the environment `name`; each of `installs` is one `pip install`."""
    folder = cache_dir() / "venvs" / f"{name}-py{_VERSION}"
    python, stamp = folder / "bin" / "python", folder / ".complete"
    wanted = "\n".join(" ".join(packages) for packages in installs)
    with _locked(folder):
        if not python.exists():  # absent, or its Python was removed
            stamp.unlink(missing_ok=True)
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _lend_torch(folder / "lib" / f"python{_VERSION}" / "site-packages")
        if not stamp.exists() or stamp.read_text() != wanted:
            for packages in installs:
                pip = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
                _run([*pip, "-c", str(CONSTRAINTS), *packages])
            stamp.write_text(wanted)
    return python


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lend_torch(site: Path) -> None:
    """Make our torch importable there, and known to pip as installed.

    Links alone would be followed when pip removes a package, so they lie in a folder of their own,
    and what pip reads is a description without files.
    """
    lent = site / "_lent"
    if (lent / "torch").exists():  # also when the clone that lent it is gone
        return
    torch = importlib.metadata.distribution("torch")
    ours = Path(str(torch.locate_file("")))
    lent.mkdir(exist_ok=True)
    tops = {Path(str(file)).parts[0] for file in torch.files or ()}
    for name in sorted(tops | {*_WITH_TORCH}):
        if (ours / name).is_dir() and not name.endswith((".dist-info", "..")):
            (lent / name).unlink(missing_ok=True)
            (lent / name).symlink_to(ours / name)
    (site / "_lent.pth").write_text("_lent\n")
    needs = [need for need in torch.requires or () if "extra" not in need]
    about = site / f"torch-{torch.version}.dist-info"
    about.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {torch.version}"]
    lines += [f"Requires-Dist: {need}" for need in needs if not _NEED_OF_TORCH.match(need)]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    (about / "INSTALLER").write_text("tinkex-tests\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (about / "RECORD").write_text("".join(f"{about.name}/{name},,\n" for name in names))


def _run(command: list[str]) -> None:
    """Three times at most: a package index may be away for a moment."""
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

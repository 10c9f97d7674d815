"""R32: the official SDKs, as released, run a whole afternoon's work against `tinkex serve`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))
from postgres_cluster import NoPostgresError, start_cluster
from run import API_KEY, run_exactness, run_peer
from venvs import SDK_VERSIONS

IN_EVERY_RUN = (SDK_VERSIONS[0], SDK_VERSIONS[-1])
OTHERS = [version for version in SDK_VERSIONS if version not in IN_EVERY_RUN]


@pytest.mark.peers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "version",
    [*IN_EVERY_RUN, *(pytest.param(version, marks=pytest.mark.slow) for version in OTHERS)],
)
def test_an_official_sdk_works_against_the_toy_engine(version: str, tmp_path: Path) -> None:
    report = run_peer(version, "toy", tmp_path)
    assert report.ok, report.failures
    # The key is in no log, database or checkpoint; only its hash is kept.
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert not [file for file in files if API_KEY.encode() in file.read_bytes()]


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_newest_official_sdk_works_against_a_real_model(tmp_path: Path) -> None:
    report = run_peer(SDK_VERSIONS[-1], "torch", tmp_path)
    assert report.ok, report.failures


@pytest.mark.peers
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_users_rely_on_to_the_bit_holds_on_the_toy_engine(exact: bool, tmp_path: Path) -> None:
    """Snapshots, tenants, weights, resume: with the newest official SDK (see exactness.py)."""
    report = run_exactness("toy", tmp_path, exact=exact)
    assert report.ok, report.failures


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exact", [True, False])
def test_what_users_rely_on_to_the_bit_holds_on_a_real_model(exact: bool, tmp_path: Path) -> None:
    report = run_exactness("torch", tmp_path, exact=exact)
    assert report.ok, report.failures


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_newest_official_sdk_works_with_postgresql(tmp_path: Path) -> None:
    try:
        cluster = start_cluster()
    except NoPostgresError as exc:
        pytest.skip(str(exc))
    try:
        report = run_peer(SDK_VERSIONS[-1], "toy", tmp_path, "--database", cluster.url("postgres"))
        assert report.ok, report.failures
    finally:
        cluster.stop()

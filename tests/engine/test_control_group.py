"""Memory that a container leaves, by made-up files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.engine import control_group
from tinkex.engine.numerics import memory_in_use

GB = 1 << 30
NO_LIMIT = 9223372036854771712


def _write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path / "proc"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def test_without_control_groups_nothing_is_bounded(proc: Path, groups: Path) -> None:
    assert control_group.free_bytes(proc, groups) is None
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert control_group.free_bytes(proc, groups) is None
    _write(groups, memory_max="max", memory_current=GB)
    assert control_group.free_bytes(proc, groups) is None


def test_the_tightest_of_nested_groups_of_version_2_counts(proc: Path, groups: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/kube/pod/main\n")
    _write(groups / "kube" / "pod" / "main", memory_max="max", memory_current=GB)
    _write(groups / "kube" / "pod", memory_max=4 * GB, memory_current=3 * GB)
    _write(groups / "kube", memory_max=64 * GB, memory_current=9 * GB)
    assert control_group.free_bytes(proc, groups) == GB
    stat = f"anon 5\nactive_file {GB // 2}\ninactive_file {GB}\nfile 7"
    _write(groups / "kube" / "pod", memory_stat=stat)
    assert control_group.free_bytes(proc, groups) == GB + 3 * GB // 2, "cached files can go"
    _write(groups / "kube" / "pod" / "main", memory_max=2 * GB)
    assert control_group.free_bytes(proc, groups) == GB


def test_version_1_has_other_names_and_a_number_for_no_limit(proc: Path, groups: Path) -> None:
    listing = "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n"
    (proc / "self" / "cgroup").write_text(listing)
    memory = groups / "memory"
    _write(memory, memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes=50 * GB)
    assert control_group.free_bytes(proc, groups) is None
    _write(memory / "docker" / "abc", memory_limit_in_bytes=3 * GB, memory_usage_in_bytes=2 * GB)
    stat = f"inactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file 4"
    _write(memory / "docker" / "abc", memory_stat=stat)
    assert control_group.free_bytes(proc, groups) == 2 * GB + 4


def test_inside_a_container_the_root_is_ours(proc: Path, groups: Path) -> None:
    """Its path is the host's, which is not mounted there."""
    (proc / "self" / "cgroup").write_text("0::/../../of/the/host\n")
    _write(groups, memory_max=2 * GB, memory_current=3 * GB)
    assert control_group.free_bytes(proc, groups) == 0, "never less than nothing"
    (proc / "self" / "cgroup").write_text("4:memory:/of/the/host\n")
    limits = {"memory_limit_in_bytes": GB, "memory_usage_in_bytes": 5}
    _write(groups / "memory", **limits)
    assert control_group.free_bytes(proc, groups) == GB - 5


def test_models_are_admitted_by_the_least_of_machine_and_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_group, "free_bytes", lambda: None)
    whole = memory_in_use.free_bytes()
    assert whole > 0
    monkeypatch.setattr(control_group, "free_bytes", lambda: 1000)
    assert memory_in_use.free_bytes() == 1000
    monkeypatch.setattr(control_group, "free_bytes", lambda: 1 << 60)
    assert 0 < memory_in_use.free_bytes() < 1 << 60

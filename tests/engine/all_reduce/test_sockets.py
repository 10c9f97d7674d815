"""A process group without torch: all ranks get what all gave, or an error in time."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinkex.engine.all_reduce import sockets
from tinkex.engine.jobs import LOOPBACK, JoinGroupJob
from tinkex.errors import EngineError


def job(rank: int, size: int, address: str, timeout_s: float = 20.0) -> JoinGroupJob:
    return JoinGroupJob(
        job_id="j",
        group_id="a secret",
        rank=rank,
        size=size,
        address=address,
        host=LOOPBACK,
        timeout_s=timeout_s,
    )


def together(size: int, address: str, store: Any = None) -> list[Any]:
    """The values of all ranks, as each of them sees them."""

    def member(rank: int) -> Any:
        group = sockets.join(job(rank, size, address), None if rank else store)
        values = group.broadcast(group.gather({rank: rank * 1.5}))
        group.close()
        return values

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_see_the_values_of_all_in_order(tmp_path: Path, size: int) -> None:
    seen = together(size, f"file:{tmp_path / 's'}")
    assert seen == [[{rank: rank * 1.5} for rank in range(size)]] * size


def test_ranks_of_several_machines_find_each_other_at_an_address() -> None:
    store, address = sockets.open_store(LOOPBACK)
    assert together(2, address, store) == [[{0: 0.0}, {1: 1.5}]] * 2


def test_a_stranger_who_does_not_know_the_group_is_turned_away() -> None:
    store, address = sockets.open_store(LOOPBACK)
    with socket.create_connection(store.getsockname()) as stranger:
        stranger.sendall(b"\x00\x00\x00\x04oops")
        assert together(2, address, store) == [[{0: 0.0}, {1: 1.5}]] * 2


def test_a_stranger_who_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_PROOF_S", 0.2)
    store, address = sockets.open_store(LOOPBACK)
    with socket.create_connection(store.getsockname()):
        assert together(2, address, store) == [[{0: 0.0}, {1: 1.5}]] * 2


def test_a_first_rank_that_says_nothing_is_not_waited_for_for_ever() -> None:
    store, address = sockets.open_store(LOOPBACK)
    with store, pytest.raises(EngineError, match="rank 1 of 2 found no process group"):
        sockets.join(job(1, 2, address, timeout_s=0.2), None)


def test_a_rank_that_takes_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 's'}"
    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(
            lambda rank: sockets.join(job(rank, 2, address, timeout_s=0.5), None), range(2)
        )
    with pytest.raises(EngineError, match="takes nothing"):
        first.broadcast(bytes(1 << 26))
    first.close()
    other.close()


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    for rank in range(2):
        with pytest.raises(EngineError, match=f"rank {rank} of 2 found no process group"):
            sockets.join(job(rank, 2, f"file:{tmp_path / str(rank)}", timeout_s=0.2), None)


def test_a_rank_that_leaves_in_the_middle_is_noticed(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 's'}"
    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(lambda rank: sockets.join(job(rank, 2, address), None), range(2))
    other.close()
    with pytest.raises(EngineError, match="another worker is gone"):
        first.gather("value")
    first.close()

"""A real server with several engine processes answers as one with a single engine does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kills import HERE
from server_process import ServerProcess
from whole_loop import Seen, run_tenants

EAGER = (str(HERE / "eager_server.py"),)
FLAGS = ("--engine", "torch", "--device", "cpu")


def seen_with(
    folder: Path, model: Path, num_workers: int, *flags: str, rate: float = 0.01
) -> list[Seen]:
    """Two tenants: on one worker in turn, on several at the same time."""
    flags = (*FLAGS, *flags, "--model", str(model), "--workers", str(num_workers))
    with ServerProcess(folder / str(num_workers), *flags, program=EAGER) as server:
        seen = run_tenants(
            server, model, num_workers=num_workers, rate=rate, together=num_workers > 1
        )
    assert [one.num_workers for one in seen] == [num_workers, num_workers]
    assert any("adapter_model.safetensors" in name for name in seen[0].numbers)
    return seen


def assert_same_bits(folder: Path, model: Path, num_workers: int) -> None:
    alone = seen_with(folder, model, 1, "--deterministic")
    together = seen_with(folder, model, num_workers, "--deterministic")
    assert alone[0].differs(alone[1]), "the two tenants do different things"
    for one, several in zip(alone, together, strict=True):
        assert several.differs(one) == []


def test_two_workers_give_two_tenants_the_bits_that_one_gives_each_alone(
    tmp_path: Path, tiny_model: Path
) -> None:
    assert_same_bits(tmp_path, tiny_model, 2)


@pytest.mark.slow
def test_four_workers_give_two_tenants_the_bits_that_one_gives_each_alone(
    tmp_path: Path, tiny_model: Path
) -> None:
    assert_same_bits(tmp_path, tiny_model, 4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_without_determinism_the_numbers_are_equal_within_rounding(
    tmp_path: Path, tiny_model: Path, size: int
) -> None:
    for one, several in zip(
        seen_with(tmp_path, tiny_model, 1, rate=1e-4),
        seen_with(tmp_path, tiny_model, size, rate=1e-4),
        strict=True,
    ):
        assert several.exact == one.exact
        assert several.numbers.keys() == one.numbers.keys()
        for name, values in one.numbers.items():
            np.testing.assert_allclose(several.numbers[name], values, 1e-6, 1e-6, err_msg=name)

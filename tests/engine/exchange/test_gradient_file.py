"""Gradients in a file are those that were written, bit by bit, and a reader's are its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tinkex.engine.exchange import gradient_file


def test_what_is_read_is_what_was_written_and_belongs_to_the_reader(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "0": rng.normal(size=7).astype(np.float32),
        "5": np.zeros((0, 3), np.float32),
        "ids": rng.integers(0, 9, (3, 5)),
    }
    size_bytes = gradient_file.write(tmp_path / "a.grad", arrays)
    assert size_bytes == (tmp_path / "a.grad").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["a.grad"]
    read = gradient_file.read(tmp_path / "a.grad")
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert read[name].flags.aligned
        np.testing.assert_array_equal(read[name], array)
    read["0"] += 1.0
    (tmp_path / "b.grad").write_bytes((tmp_path / "a.grad").read_bytes())
    (tmp_path / "a.grad").unlink()
    np.testing.assert_array_equal(read["0"], arrays["0"] + 1.0)
    np.testing.assert_array_equal(gradient_file.read(tmp_path / "b.grad")["0"], arrays["0"])


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    gradient_file.write(tmp_path / "a.grad", {"0": np.ones(100, np.float32)})
    whole = (tmp_path / "a.grad").read_bytes()
    (tmp_path / "a.grad").write_bytes(whole[:200])
    with pytest.raises(EOFError, match=r"a\.grad ends too early"):
        gradient_file.read(tmp_path / "a.grad")

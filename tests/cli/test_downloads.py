"""What an export leaves on the disk."""

from __future__ import annotations

import os
import stat

from tinkex.cli.downloads import put


def test_an_export_is_readable_as_any_file_is(tmp_path):
    made = tmp_path / "made"
    made.mkdir(mode=0o700)
    (made / "model.safetensors").touch(mode=0o600)
    umask = os.umask(0o022)
    try:
        put(made, tmp_path / "out")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755

"""The README's two commands on a bare Debian, as an ordinary user (W part 1)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mmdebstrap") is None,
    reason="needs root and mmdebstrap (apt install mmdebstrap) to make a bare Debian",
)
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_quickstart_and_test_pass_on_a_bare_debian(release):
    subprocess.run([TOP / "dev/bare_debian.sh", release], check=True)

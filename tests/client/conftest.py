"""The harness of this folder's tests is importable: `virtual_time`, `hostile`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

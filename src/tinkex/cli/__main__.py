"""`python -m tinkex.cli` is `tinkex`, where the script is not on the path."""

from __future__ import annotations

from tinkex.cli.app import main

main()

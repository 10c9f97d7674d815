"""Every setting of the client is documented, with its variable and its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tinkex.client.config import _NUMBERS, ClientConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client-settings.md"
ROW = re.compile(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", re.M)


def test_every_setting_has_a_row_and_every_row_a_setting() -> None:
    documented = {name for name, _, _ in ROW.findall(PAGE.read_text("utf-8"))}
    assert documented == {field.name for field in dataclasses.fields(ClientConfig)}


def test_the_numbers_on_the_page_are_the_defaults() -> None:
    rows = {name: (variable, default) for name, variable, default in ROW.findall(PAGE.read_text())}
    for field in dataclasses.fields(ClientConfig):
        variable, default = rows[field.name]
        if field.name in _NUMBERS:
            assert f"TINKEX_CLIENT_{field.name.upper()}" in variable
            assert float(default) == field.default
        elif isinstance(field.default, bool):
            assert default.strip().startswith("on" if field.default else "off"), field.name

"""A visitor of the console, for the tests of its pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
from patience import PATIENCE_S

HOSTILE = "<script>alert(1)</script>"


@contextmanager
def visitor(world: SimpleNamespace, key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=world.base_url, follow_redirects=True, timeout=PATIENCE_S) as client:
        assert client.post("/console/login", data={"key": key}).status_code == 200
        yield client


def token_of(page: str) -> str:
    found = re.search(r'name="form-token" content="(\w+)"', page)
    assert found is not None
    return found[1]

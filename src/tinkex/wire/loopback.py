"""A server on this machine is reached directly: a proxy would look for it on itself.

Networks that are left through a proxy set `http_proxy` for everything, often without `no_proxy`.
"""

from __future__ import annotations

from collections.abc import Mapping

DIRECT: Mapping[str, None] = {"all://localhost": None, "all://127.0.0.1": None, "all://[::1]": None}
"""For the `mounts` of an httpx client: these hosts never through the environment's proxy."""

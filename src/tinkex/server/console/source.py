"""Where the pages get runs from: a server's own, or folders on this disk.

The pages know this shape and nothing behind it, so `tinkex console --log-dir` shows the same
pages as a server. Everything is plain data, the same for HTML and for JSON.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlencode

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from tinkex.server.console.launcher import Launcher
from tinkex.server.fairness.gate import FairGate
from tinkex.server.guard.failed_logins import FailedLogins
from tinkex.server.guard.quotas import Quotas
from tinkex.server.runs.curves import Curve
from tinkex.store import User
from tinkex.types.service.extensions import MAX_METRIC

PAGE = 50
SETTINGS_PAGE = 200
MAX_SENT = 100_000
"""Points that a page is sent at once; more are thinned first."""
SORTS = {"newest": "newest first", "active": "last used first", "oldest": "oldest first"}
STATUSES = {
    "running": "running or waiting",
    "idle": "idle",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "lost": "lost",
}


Text = Annotated[str, Field(max_length=200)]


class Query(BaseModel):
    """The runs that a visitor wants to see, as the page's address says it."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    page: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    search: Annotated[Text, Field(alias="q")] = ""
    tag: Text = ""
    model: Text = ""
    project: Text = ""
    status: Literal["", "running", "idle", "finished", "stopped", "failed", "lost"] = ""
    sort: Literal["newest", "oldest", "active"] = "newest"
    everyone: bool = False
    """Of all users, for administrators."""
    view: Literal["", "settings", "folders"] = ""
    """A list with curves, a table of the runs' settings, or the runs of folders on this disk."""
    by: Text = ""
    """The setting that the table is sorted by."""
    down: bool = False
    """The largest first."""
    all: bool = False
    """Settings that are equal in all runs, too."""

    @property
    def page_size(self) -> int:
        return SETTINGS_PAGE if self.view == "settings" else PAGE

    @property
    def is_narrowed(self) -> bool:
        """Whether runs may be left out."""
        return bool(self.search or self.tag or self.model or self.project or self.status)

    def address(self, **changes: Any) -> str:
        """The page's address with some of it changed; what is default is left out."""
        wanted = self.model_copy(update={"page": 0, **changes})
        given = wanted.model_dump(by_alias=True, exclude_defaults=True)
        return f"/console?{urlencode(given)}" if given else "/console"


class Source(Protocol):
    is_local: bool
    """Folders of the visitor's own: there is nothing to change and nobody to ask."""
    has_folders: bool = False
    """Beside a server's runs there are folders on this disk."""

    @property
    def is_ending(self) -> bool:
        return False

    async def page(self, user: User, query: Query) -> dict[str, Any]:
        """`runs` of one page, their `total`, `pages`, and the `models` and `projects` there are.

        Each run has its `settings` and `tells_settings` where the table of settings is asked for,
        and its `folder` where it is one.
        """
        ...

    async def run(self, user: User | None, run_id: str) -> dict[str, Any]:
        """Everything about one run but its curves; `user` None may see anybody's.

        Raises:
            ApiError: 404, there is none, or it is not the visitor's to see.
        """
        ...

    async def check(self, user: User | None, run_id: str) -> None:
        """Raises ApiError 404 like `run`, for less."""
        ...

    async def curves(self, run_id: str) -> dict[str, Curve]: ...

    def doing(self, run_id: str) -> str:
        """The work of a run right now, in words, where that is known."""
        return ""

    async def rollout_steps(self, run_id: str) -> list[int]: ...

    async def rollouts(self, run_id: str, step: int) -> list[dict[str, Any]]:
        """Answers of one step as `recipes.rollouts` writes them; `advantages` may be by token."""
        ...

    async def base_models(self) -> list[str]:
        """Names that a recipe may train."""
        return []

    def agreement(self, user: User) -> bool | None:
        """Whether the visitor's answers are kept; None: that is not for the visitor to say."""
        return None


class VisitorAuth(Protocol):
    """As much of `Auth` as pages need that only show something."""

    @property
    def is_open(self) -> bool: ...

    async def user_of(self, credential: str | None) -> User: ...

    async def is_admin(self, credential: str | None) -> bool: ...


@dataclass(frozen=True, slots=True)
class ConsoleDependencies:
    """The parts that pages need, over a server and over folders alike."""

    source: Source
    auth: VisitorAuth
    failed_logins: FailedLogins
    quotas: Quotas | None = None
    """None over folders on one's own disk."""
    launcher: Launcher | None = None
    """None where nobody may start programs from a browser."""
    drawing: FairGate = field(default_factory=lambda: FairGate(2))
    """Turns for what is made of very many points."""
    owners: Source | None = None
    """What the person who runs the server is shown instead."""
    watching: Counter[str] = field(default_factory=Counter)
    """Live streams by user."""


def console_of(request: Request) -> ConsoleDependencies:
    console: ConsoleDependencies = request.scope["app"].state.console
    return console


def source_of(request: Request) -> Source:
    """The runs that this visitor is shown; whose they are, each call asks by itself."""
    console = console_of(request)
    is_owner = getattr(request.state, "is_owner", False)
    return console.owners if is_owner and console.owners is not None else console.source


def number_in(value: Any) -> float | None:
    """A number from JSON that anybody may have written; None for all that no metric may be."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_METRIC else None


def copied(curve: Curve) -> Curve:
    """A curve that no later point changes."""
    lists = {name: list(getattr(curve, name)) for name in ("steps", "values", "moments")}
    return replace(curve, **lists)  # type: ignore[arg-type]


def _points(curve: Curve, start: int = 0, every: int = 1) -> dict[str, Any]:
    chosen = slice(start + (len(curve.steps) - 1 - start) % every, None, every)  # with the last
    return {
        "steps": curve.steps[chosen],
        "values": curve.values[chosen],
        "at": curve.moments[chosen],
        "stride": curve.stride * every,
    }


def thinned_curves(curves: Mapping[str, Curve], most: int = MAX_SENT) -> dict[str, Any]:
    """Curves as JSON, together about `most` points, so that a page is never many megabytes.

    It asks for all points of a metric (`/console/api/curves?names=`) when somebody looks at it.
    """
    total = sum(len(curve.steps) for curve in curves.values())
    every = math.ceil(total / max(most, 1)) or 1
    return {name: _thinned(name, curve, every) for name, curve in sorted(curves.items())}


def _thinned(name: str, curve: Curve, every: int) -> dict[str, Any]:
    # The axis of tokens adds these up: a part of them would be a shorter axis.
    every = 1 if name in ("tokens", "num_tokens") else every
    return {**_points(curve, every=every), "isMore": False, "isPart": every > 1}


class Growth:
    """The points of a run's curves that a page has not seen yet."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def of(self, curves: dict[str, Curve]) -> dict[str, Any]:
        """Curves that grew: their new points (`isMore`), or all where they were thinned."""
        grown: dict[str, Any] = {}
        whole: dict[str, Curve] = {}
        for name, curve in curves.items():
            stride, num_made = self._seen.get(name, (0, 0))
            num_new = curve.num_made - num_made
            if stride == curve.stride and num_new == 0:
                continue
            if stride == curve.stride and 0 < num_new <= len(curve.steps):
                grown[name] = {**_points(curve, len(curve.steps) - num_new), "isMore": True}
            else:
                whole[name] = curve
            self._seen[name] = (curve.stride, curve.num_made)
        grown |= thinned_curves(whole)
        return dict(sorted(grown.items()))


def age(moment: float) -> str:
    return f"{length} ago" if (length := span(time.time() - moment)) else "just now"


def span(seconds: float) -> str:
    """The whole days, hours or minutes of a time; empty below a minute."""
    for length, noun in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {noun}{'' if number == 1 else 's'}"
    return ""


def file_stem(name: str) -> str:
    """A run's name as that of a download, in characters that no header and no disk minds."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:80].strip("-.") or "run"


def resume(path: str) -> str:
    """The line of code that goes on from a checkpoint."""
    return f"training = service.create_training_client_from_state_with_optimizer({path!r})"

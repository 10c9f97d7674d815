"""What the server admits is what the engine computes: one table of losses, told twice."""

from __future__ import annotations

from tinkex.engine.train.losses import LOSSES as ENGINE
from tinkex.server.validation import LOSSES as SERVER


def test_server_and_engine_agree_on_every_loss():
    """The server must not queue what the engine refuses, nor refuse what it can do."""
    engine = {
        name: (set(loss.needs), set(loss.takes), set(loss.settings))
        for name, loss in ENGINE.items()
    }
    assert {name: tuple(map(set, row)) for name, row in SERVER.items()} == engine

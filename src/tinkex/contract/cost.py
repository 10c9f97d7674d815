"""What a request costs: the units in which everything that it can ask for is counted.

A few bytes can ask for much: by a shape, a count, a graph, lists in lists, an archive. So a request
is judged by what it becomes. Each message names the most that it may cost (`wire.endpoints`,
`server.compat`); it is held to that at the door, before anything is built, and again where the work
runs. A number in a message says by `Between.becomes` in which unit it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter, le

from tinkex.contract import sparse, traced

MIB = 1024 * 1024
NOTHING = "nothing"
"""The unit of a number that only names, orders, dates or narrows."""
_WORDS = {
    "sent_bytes": "bytes",
    "containers": "lists and objects",
    "keys": "keys",
    "values": "values",
    "depth": "levels of lists and objects in each other",
    "texts": "strings",
    "memory_bytes": "bytes of memory",
    "result_bytes": "bytes of its result",
    "draws": "draws of a token",
    "operations": "operations",
    "files": "files and folders",
    "rows": "rows",
}
UNITS = frozenset(_WORDS)
_amounts = attrgetter(*_WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a request; as a limit, the most of each. What is not named is none of it."""

    sent_bytes: int = 0
    """Of its body or archive, packed and unpacked."""
    containers: int = 0
    """Lists and objects of JSON."""
    keys: int = 0
    values: int = 0
    """Of JSON, or fields of protobuf."""
    depth: int = 0
    texts: int = 0
    memory_bytes: int = 0
    """Held at once where it runs, beside what was sent."""
    result_bytes: int = 0
    draws: int = 0
    """Of tokens inside a pass, in which nobody else has a turn."""
    operations: int = 0
    files: int = 0
    rows: int = 0
    """Of a database, read or written."""

    def exceeded(self, asked: Cost) -> str:
        """The first of these limits that a cost is above, in words; empty when it is above none."""
        amounts, limits = _amounts(asked), _amounts(self)
        if all(map(le, amounts, limits)):
            return ""
        triples = zip(amounts, limits, _WORDS.values(), strict=True)
        amount, limit, words = next(triple for triple in triples if triple[0] > triple[1])
        return f"{amount} {words}, the limit is {limit}"

    def __add__(self, other: Cost) -> Cost:
        """Both together: the deeper one is as deep as they are."""
        pairs = zip(_WORDS, _amounts(self), _amounts(other), strict=True)
        return Cost(**{unit: max(a, b) if unit == "depth" else a + b for unit, a, b in pairs})


JSON = Cost(
    sent_bytes=24 * MIB,
    containers=250_000,
    keys=1_500_000,
    values=1_500_000,
    depth=1024,
    texts=500_000,
)
"""A body of JSON, whatever it is for: a few parts around long arrays stay far below."""
PROTOBUF = Cost(values=200_000)
"""A body of protobuf, whose bytes its endpoint limits."""

SMALL = replace(JSON, sent_bytes=MIB)
"""A few fields."""
MEDIUM = replace(JSON, sent_bytes=16 * MIB)
"""A prompt, a graph, a list of ids."""
LARGE = replace(JSON, sent_bytes=32 * MIB)
"""Training data, many prompts; a server's own setting may allow more bytes of protobuf."""
FILE = Cost(sent_bytes=2**40, files=64, depth=16, keys=2**16)
"""An archive of plain files. The server's own setting is the limit of its bytes. Its keys are the
names of tensors in it; 48 layers of 128 experts have half as many."""

UPLOAD = Cost(sent_bytes=2**43, files=1)
"""Written to the disk as it comes: a setting of its own is the limit of its bytes."""

TRAINING = replace(
    LARGE,
    memory_bytes=sparse.dense_limit(LARGE.sent_bytes, LARGE.sent_bytes),
    operations=traced.request_limit(LARGE.sent_bytes),
)
"""The most for the largest body; less for the tokens and bytes of a smaller one."""
RESULT = Cost(result_bytes=64 * MIB, draws=2**17)
"""A sample; a server's own setting may say other bytes (`max_sample_bytes`)."""
SAMPLE = replace(
    MEDIUM,
    memory_bytes=8 * MEDIUM.sent_bytes,  # sparse targets stay as sparse as they came
    result_bytes=RESULT.result_bytes,
    draws=RESULT.draws,
)
SAMPLES = replace(SAMPLE, sent_bytes=LARGE.sent_bytes)
"""Many in one body, each of which may cost as much as a sample."""
MODEL = replace(SMALL, memory_bytes=2**40)
"""An adapter; the worker knows what memory it has, and refuses one that does not fit."""
SEARCH = replace(SMALL, rows=200)

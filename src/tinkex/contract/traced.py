"""How much work a traced loss may be: operations counted from shapes, and seconds.

An operation is one simple step on one element, or a multiplication or addition of a product
(2 m n k for [m, k] times [k, n]). An element counts `COSTLY` in a step that is not simple (an
exponential, a sort, an index by a tensor). Backward passes are not counted; they take about twice
the time of what was counted.
"""

from __future__ import annotations

COSTLY = 32
"""What an element counts in a step that is not simple."""
STEP_OPERATIONS = 2**14
"""What every step counts beside its elements: a thousand steps on nothing take time, too."""
DATUM_OPERATIONS = 2**32
"""Most operations for one datum."""
REQUEST_OPERATIONS = 2**33
"""Most operations for a request, without its tokens."""
TOKEN_OPERATIONS = 2**16
"""More for each token of a request; the smallest model takes a thousand times as many for it."""
DATUM_S, REQUEST_S = 20.0, 60.0
"""Most seconds that an engine spends on the loss of one datum, and of a request."""
ADVICE = (
    "Use fewer or smaller steps, send fewer datums at a time, or pass the function itself to "
    "forward_backward_custom to run it on your side."
)


def request_limit(num_tokens: int) -> int:
    """The most operations of the traced loss of a request with so many tokens."""
    return REQUEST_OPERATIONS + TOKEN_OPERATIONS * num_tokens

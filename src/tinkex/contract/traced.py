"""How much work a traced loss may be: operations counted from shapes, and seconds.

An operation is one simple step on one element, or a multiplication or addition of a product
(2 m n k for [m, k] times [k, n]). An element counts `COSTLY` in a step that is not simple (an
exponential, an index by a tensor) and `SLOW` in the slowest of them (a sort, a Bessel function).
Backward passes are not counted; they take about twice the time of what was counted. Others run
between two steps, forward and backward, so a single step has a limit of its own.
"""

from __future__ import annotations

COSTLY = 32
"""What an element counts in a step that is not simple."""
SLOW = 256
"""What an element counts in a sort and the like: about half a microsecond each on a CPU."""
STEP_OPERATIONS = 2**14
"""What every step counts beside its elements: a thousand steps on nothing take time, too."""
ONE_STEP_OPERATIONS = 2**29 + STEP_OPERATIONS
"""Most operations of one step, products aside: seconds in which nobody else has a turn."""
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

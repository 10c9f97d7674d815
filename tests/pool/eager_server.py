"""`tinkex serve` with a pool that splits every pass it can, however small.

A pass of a tiny model takes milliseconds, which no pool would split. Here splitting is taken to be
free, so that tests of the whole server go the way that large passes go.
"""

from tinkex.server.serve import serve
from tinkex.server.workers import placement

if __name__ == "__main__":
    placement.PART_S = -1e6
    serve()

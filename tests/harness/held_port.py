"""A port that stays ours between the lives of a server.

A socket that is bound and does not listen keeps the kernel from giving the port to somebody who
asks for a free one, which tests beside us do all the time. A server may bind it nevertheless,
for both sockets say SO_REUSEADDR, and while none listens a connection is refused as ever.
"""

from __future__ import annotations

import socket
import weakref


class HeldPort:
    """Held until this object goes."""

    def __init__(self) -> None:
        holder = socket.socket()
        weakref.finalize(self, holder.close)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        self.number = int(holder.getsockname()[1])

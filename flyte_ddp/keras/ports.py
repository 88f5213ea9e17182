"""Ports on this host for processes that must know each other's ports before they start. Standard library only."""

import socket
import sys
from contextlib import ExitStack, contextmanager
from typing import Iterator, List


@contextmanager
def free_ports(count: int) -> Iterator[List[int]]:
    """Ports of 127.0.0.1 that no other process is given while the block runs.

    They are bound but not listened on; on Linux a worker can bind them anyway, because gRPC sets SO_REUSEADDR too.
    Elsewhere it could not, so they are released at once.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
        if sys.platform != "linux":
            held.close()
        yield ports

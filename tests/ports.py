"""Ports for servers that a test kills and starts again.

They lie below those that the kernel gives to connections and listeners that name none. While such a
server is away, a connection of anybody, or one that is tried to the server itself, could otherwise
be given its port, and the server would not come back.
"""

import contextlib
import random
import socket
from typing import Final

PORTS: Final = range(10_000, 32_000)


def free_port() -> int:
    """Return a port that nobody but another test, by the same rare draw, takes meanwhile."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def free_ports(count: int) -> list[int]:
    """Return as many different ones."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return sorted(found)

"""Ports of loopback for servers."""

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, nor gets for a connection: a server may come back to them."""
    found: dict[int, None] = {}
    while len(found) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found[port] = None
    return list(found)

"""Commands to Redis servers and back: connections, the slots of a cluster, and errors in kvass' terms."""

import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from kvass.errors import ConfigError, TierUnavailableError
from kvass.tiers.redis.address import Address
from kvass.tiers.redis.errors import in_our_terms

Command = tuple[str | int | memoryview | bytes, ...]
Reply = Any
"""Bytes, an int, None, or a list of these."""

Connection = Any
"""redis-py's, whose methods have no types."""

_CONNECT_SECONDS = 2.0

_READ_BYTES = 256 << 10
"""Bytes asked of a socket at once."""


def facts(info: bytes) -> dict[str, str]:
    """The lines of an INFO reply."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: value for name, _, value in lines if value}


class _Node:
    """One server's idle connections, the last used first."""

    def __init__(self, address: Address, place: tuple[str, int] | None, seconds: float):
        from redis import connection as kinds
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._options: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "db": address.database,
            "socket_timeout": seconds,
            "socket_connect_timeout": min(seconds, _CONNECT_SECONDS),
            "socket_read_size": _READ_BYTES,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if place is None:
            self._kind: Any = kinds.UnixDomainSocketConnection
            self._options["path"] = address.path
        else:
            self._kind = kinds.SSLConnection if address.tls else kinds.Connection
            self._options["host"], self._options["port"] = place
            if address.tls:
                self._options["ssl_ca_certs"] = address.ca_file
        self._idle: deque[Connection] = deque()

    def take(self) -> Connection:
        """An idle connection, or one that is still to be made."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._kind(**self._options)

    @staticmethod
    def make_good(connection: Connection) -> None:
        """Connect it where it is not, or is no longer. Raises RedisError."""
        # where the server closed it meanwhile nothing was sent, so this is no retry
        if connection.is_connected and _is_stale(connection):
            connection.disconnect()
        connection.connect()

    def give(self, connection: Connection) -> None:
        self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().disconnect()


def _is_stale(connection: Connection) -> bool:
    import redis

    try:
        return bool(connection.can_read(0))
    except (redis.RedisError, OSError):
        return True


class _State:
    """What must not be shared with a forked child."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.nodes: dict[tuple[str, int] | None, _Node] = {}
        self.lent: dict[Connection, float] = {}
        """Connections in use, and until when (monotonic seconds)."""
        self.slots: list[tuple[str, int]] = []
        """The master of each slot of a cluster; empty: not known, or no longer trusted."""


class Link:
    """A server or a cluster. No call retries; each socket operation ends after `seconds`.

    Raises TierUnavailableError, TierFullError and TierError, as a `Store` does.
    """

    def __init__(self, address: Address, seconds: float):
        try:
            import redis  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "redis_url is set, but redis-py is not installed; pip install 'kvass[redis]'"
            ) from error
        self.address = address
        self._seconds = seconds
        self._closed = False
        self._current = _State()

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """The replies to commands of one key each (the second word; of EVAL the fourth), each on the server
        that has the key; one round trip, more where slots move. The first error reply is raised."""
        if not commands:
            return []
        with self._translated():
            return self._checked(self._routed(commands))

    def everywhere(self, commands: Sequence[Command]) -> list[list[Reply]]:
        """The replies of each master to the same commands."""
        with self._translated():
            places = self._places()
            found = self._sent([(self._node(place), commands) for place in places])
            return [self._checked(replies) for replies in found]

    def scan(self, pattern: str) -> Iterator[list[bytes]]:
        """Keys of strings that match, page by page; one may come twice."""
        with self._translated():
            places = self._places()
        for place in places:
            cursor = 0
            while True:
                command: Command = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                with self._translated():
                    reply = self._checked(self._sent([(self._node(place), [command])])[0])[0]
                cursor = int(reply[0])
                yield reply[1]
                if cursor == 0:
                    break

    def end_late(self) -> None:
        """Break off exchanges that take too long: a socket's time-out never ends a reply that trickles in."""
        for connection, until in list(self._current.lent.items()):
            if time.monotonic() > until and connection._sock is not None:
                with suppress(OSError):
                    connection._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        for node in list(self._current.nodes.values()):
            node.close()

    # -- which server ---------------------------------------------------------------------------------

    def _state(self) -> _State:
        if self._closed:
            raise TierUnavailableError("the Redis store is closed")
        if self._current.pid != os.getpid():
            self._current = _State()  # the parent's sockets stay the parent's
        return self._current

    def _node(self, place: tuple[str, int] | None) -> _Node:
        nodes = self._state().nodes
        if place not in nodes:
            nodes.setdefault(place, _Node(self.address, place, self._seconds))
        return nodes[place]

    def _places(self) -> list[tuple[str, int] | None]:
        if self.address.cluster:
            return list(dict.fromkeys(self._slots()))
        return [self.address.hosts[0] if self.address.hosts else None]

    def _slots(self) -> list[tuple[str, int]]:
        state = self._state()
        with state.lock:
            if not state.slots:
                members = {place for place in state.nodes if place} | set(self.address.hosts)
                state.slots = self._asked_slots(random.sample(list(members), len(members)))
            return state.slots

    def _asked_slots(self, places: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """From the first member that answers: in no order, so that one which is mistaken is not always it."""
        import redis

        failed: Exception | None = None
        for place in places:
            try:
                ranges = self._sent([(self._node(place), [("CLUSTER", "SLOTS")])])[0][0]
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if isinstance(error, redis.AuthenticationError):
                    raise
                failed = error
                continue
            if isinstance(ranges, Exception):
                raise ranges
            slots = [("", 0)] * (1 << 14)
            for first, last, master, *_ in ranges:
                host = master[0].decode() if master[0] else ""
                slots[first : last + 1] = [(host or place[0], master[1])] * (last + 1 - first)
            if ("", 0) not in slots:
                return slots
            failed = TierUnavailableError(f"the Redis cluster at {self.address} does not cover all slots")
        assert failed is not None
        raise failed

    def _distrust(self) -> None:
        self._current.slots = []

    # -- sending --------------------------------------------------------------------------------------

    def _routed(self, commands: Sequence[Command]) -> list[Reply]:
        if not self.address.cluster:
            return self._sent([(self._node(self._places()[0]), commands)])[0]
        from redis.exceptions import AskError, MovedError

        replies = self._spread(commands)
        moved = [number for number, reply in enumerate(replies) if type(reply) is MovedError]
        if moved:
            self._distrust()
            again = self._spread([commands[number] for number in moved])
            for number, reply in zip(moved, again, strict=True):
                replies[number] = reply
        for number, reply in enumerate(replies):
            if type(reply) is AskError:  # this key has moved ahead of its slot
                node = self._node((reply.host, reply.port))
                replies[number] = self._sent([(node, [("ASKING",), commands[number]])])[0][1]
        return replies

    def _spread(self, commands: Sequence[Command]) -> list[Reply]:
        from redis.crc import key_slot

        slots = self._slots()
        groups: dict[tuple[str, int], list[int]] = {}
        for number, command in enumerate(commands):
            key = command[3] if command[0] == "EVAL" else command[1]
            groups.setdefault(slots[key_slot(str(key).encode())], []).append(number)
        batches = [(self._node(place), [commands[n] for n in numbers]) for place, numbers in groups.items()]
        replies: list[Reply] = [None] * len(commands)
        for numbers, found in zip(groups.values(), self._sent(batches), strict=True):
            for number, reply in zip(numbers, found, strict=True):
                replies[number] = reply
        return replies

    def _sent(self, batches: Sequence[tuple[_Node, Sequence[Command]]]) -> list[list[Reply]]:
        """All is sent before anything is read, so that servers work side by side."""
        import redis

        with ExitStack() as stack:
            connections = []
            for node, commands in batches:
                connection = stack.enter_context(self._lent(node))
                connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                connections.append((connection, len(commands)))
            found = []
            for connection, count in connections:
                replies: list[Reply] = []
                for _ in range(count):
                    try:
                        replies.append(connection.read_response())
                    except redis.ResponseError as error:
                        replies.append(error)
                found.append(replies)
            return found

    @contextmanager
    def _lent(self, node: _Node) -> Iterator[Connection]:
        connection = node.take()
        good, lent = False, self._current.lent
        lent[connection] = time.monotonic() + self._seconds
        try:
            node.make_good(connection)
            yield connection
            good = True
        finally:
            lent.pop(connection, None)
            if good and not self._closed:
                node.give(connection)
            else:
                connection.disconnect()  # a reply that is still to come would be taken for the next one's

    # -- errors ---------------------------------------------------------------------------------------

    def _checked(self, replies: list[Reply]) -> list[Reply]:
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    @contextmanager
    def _translated(self) -> Iterator[None]:
        import redis

        try:
            yield
        except (redis.RedisError, OSError, ValueError) as error:
            meant = in_our_terms(error, self.address)
            if isinstance(meant, TierUnavailableError):
                self._distrust()
            raise meant from None  # its text may hold what was sent: a password, an object

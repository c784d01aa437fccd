"""This process as a member of a Mooncake store: joins at the first call, leaves after the last."""

import contextlib
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from kvass.config import Settings
from kvass.errors import ConfigError, TierUnavailableError
from kvass.tiers.mooncake.blocks import Blocks

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore as Client

_MASTER = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+)):(?P<port>[0-9]{1,5})")
_PROTOCOLS = ("tcp", "rdma")
_LEAST_BYTES = 16 << 20
_ANSWER_SECONDS = 2.0
"""For what the master does, none of which takes longer than milliseconds where it is well."""
_NO_REQUEST = b"GET / HTTP/1.0\r\n\r\n"
_left_behind: list["Client"] = []
"""Those that could not leave, as the master hung: that would have made the whole process wait."""


@dataclass(frozen=True)
class Member:
    """One that has joined."""

    client: "Client"
    blocks: Blocks


class Membership:
    """Joins in the background, so that whoever waits for it can stop waiting; tried anew where it failed.

    Mooncake crashes where it is called after its end: it is ended when the last call is over.
    """

    def __init__(self, kind: "type[Client]", settings: Settings, master: tuple[str, int]):
        self.master = settings.mooncake_master
        self._kind = kind
        self._settings = settings
        self._master_place = master
        self._places = {f"mooncake_master ({self.master})": master} | _metadata_place(settings)
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._joining: Future[Member] | None = None
        self._calls = 0
        self._closed = False
        self._in_doubt = False

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """From the settings; loads Mooncake. Raises ConfigError."""
        match = _MASTER.fullmatch(settings.mooncake_master)
        if not match or not 0 < int(match["port"]) < 1 << 16:
            raise ConfigError(
                f"mooncake_master: {settings.mooncake_master!r} is no host:port; write 10.0.0.5:50051"
            )
        if settings.mooncake_protocol not in _PROTOCOLS:
            raise ConfigError(
                f"mooncake_protocol: {settings.mooncake_protocol!r} is none of {', '.join(_PROTOCOLS)}"
            )
        if not settings.mooncake_host:
            raise ConfigError("mooncake_host is empty; write this machine's name or address")
        if 0 < settings.mooncake_bytes < _LEAST_BYTES:
            raise ConfigError(
                f"mooncake_bytes: {settings.mooncake_bytes} is less than Mooncake takes; write 0, or "
                f"{_LEAST_BYTES} or more"
            )
        place = (match["six"] or match["host"], int(match["port"]))
        return cls(_load(settings.remote_call_seconds), settings, place)

    # -- calls ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises TierUnavailableError once closed, and in a forked child."""
        if self._pid != os.getpid():
            raise TierUnavailableError("the Mooncake store was opened before a fork; open it again")
        if self._closed:
            raise TierUnavailableError("the Mooncake store is closed")

    @contextlib.contextmanager
    def using(self) -> Iterator[Member]:
        """The member, for one call. Raises TierUnavailableError where it cannot join in time."""
        self.check()
        with self._guard:
            self.check()
            self._calls += 1
        try:
            member = self._joined()
            if self._in_doubt:
                self._knock()
            in_doubt = False
            try:
                yield member
            except TierUnavailableError:
                in_doubt = True
                raise
            finally:
                self._in_doubt = in_doubt
        finally:
            with self._guard:
                self._calls -= 1
            self._end()

    def _knock(self) -> None:
        """Mooncake itself tries for seconds and, where it joins, lets no other thread run meanwhile."""
        seconds = min(_ANSWER_SECONDS, self._settings.remote_call_seconds)
        for name, place in self._places.items():
            try:
                _knock(place, seconds)
            except OSError as error:
                raise TierUnavailableError(f"{name} does not answer: {error}") from error

    def _joined(self) -> Member:
        with self._guard:
            joining = self._joining
            if joining is None:
                joining = self._joining = Future()
                threading.Thread(
                    target=self._join, args=(joining,), name="kvass-mooncake-join", daemon=True
                ).start()
        try:
            return joining.result(self._settings.remote_call_seconds)
        except FutureTimeoutError:
            raise TierUnavailableError(
                f"Mooncake's master at {self.master} let nobody join within "
                f"{self._settings.remote_call_seconds:g} s"
            ) from None

    def _join(self, joining: "Future[Member]") -> None:
        try:
            self._knock()
            joining.set_result(self._set_up())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            with self._guard:
                self._joining = None
            joining.set_exception(error)
        self._end()

    def _set_up(self) -> Member:
        settings, client = self._settings, self._kind()
        code = client.setup(
            settings.mooncake_host, settings.mooncake_metadata, settings.mooncake_bytes, 0,
            settings.mooncake_protocol, settings.mooncake_device, self.master,
        )  # fmt: skip
        if code:
            raise TierUnavailableError(
                f"cannot join Mooncake at {self.master} (code {code}); are mooncake_metadata, mooncake_host "
                f"and mooncake_device right, and {settings.mooncake_bytes} bytes of memory (mooncake_bytes) "
                "free? MC_LOG_LEVEL=INFO shows more"
            )
        return Member(client, Blocks(client.register_buffer, client.unregister_buffer))

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave, at once or when the last call is over."""
        if self._pid == os.getpid():
            self._closed = True
            self._end()

    def _end(self) -> None:
        with self._guard:
            joining = self._joining
            if not self._closed or self._calls or joining is None or not joining.done():
                return
            self._joining = None
        if joining.exception() is None:
            member = joining.result()
            member.blocks.close()
            try:
                _knock(self._master_place, _ANSWER_SECONDS)
            except TimeoutError:
                _left_behind.append(member.client)
                return
            except OSError:
                pass  # where nothing listens, it is soon over
            member.client.close()

    # -- for people -----------------------------------------------------------------------------------

    def advice(self) -> Iterator[tuple[str, str | None]]:
        """What the settings say. Connects to nothing."""
        settings = self._settings
        if _is_loopback(settings.mooncake_host) and not _is_loopback(self._master_place[0]):
            yield (
                f"the other members are told that this machine is {settings.mooncake_host}",
                "set mooncake_host to a name or address by which they reach it",
            )
        if not _is_loopback(self._master_place[0]):
            yield (
                "Mooncake knows no passwords and no TLS",
                "see that only machines you trust reach its ports: others can read and replace stored state",
            )
        if settings.mooncake_bytes:
            yield f"this process lends {settings.mooncake_bytes} bytes of its memory (mooncake_bytes)", None
        else:
            yield "this process lends no memory (mooncake_bytes is 0): others must", None


def _knock(place: tuple[str, int], seconds: float) -> None:
    """Raises OSError where no server closes the connection, or answers, upon what is no request."""
    with socket.create_connection(place, seconds) as connection:
        connection.settimeout(seconds)
        connection.sendall(_NO_REQUEST)
        with contextlib.suppress(ConnectionError):
            connection.recv(1)


def _metadata_place(settings: Settings) -> dict[str, tuple[str, int]]:
    """Where it is a server: for a message, and where it is. Raises ConfigError.

    Mooncake would take other URLs: it ends the process for some, and stops it for ten seconds for etcd's.
    """
    if settings.mooncake_metadata == "P2PHANDSHAKE":
        return {}
    with contextlib.suppress(ValueError):
        url = urlsplit(settings.mooncake_metadata)
        port = url.port or (443 if url.scheme == "https" else 80)
        if url.scheme in ("http", "https") and url.hostname:
            return {f"mooncake_metadata ({url.hostname}:{port})": (url.hostname, port)}
    # neither the value nor a piece of it: there may be a password
    raise ConfigError(
        "mooncake_metadata is neither P2PHANDSHAKE nor the URL of an HTTP metadata server; write it as "
        "http://host:8080/metadata"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _load(seconds: float) -> "type[Client]":
    """Mooncake's class. What is read from the environment is set first, where nobody has: once for the
    process, and the only way to bound Mooncake's calls."""
    for name, value in {
        "MC_LOG_LEVEL": "ERROR",  # of what it writes to stderr; it knows nothing quieter
        "MC_RPC_TIMEOUT_MS": str(int(min(_ANSWER_SECONDS, seconds) * 1000)),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(int(min(_ANSWER_SECONDS, seconds) * 1000)),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(max(1, int(seconds / 2))),  # each of several transfers waits so long
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, int(seconds / 2))),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    }.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as error:
        raise ConfigError(
            "mooncake_master is set, but Mooncake is not installed; pip install 'kvass[mooncake]'"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"mooncake_master is set, but Mooncake cannot be loaded ({error}); "
            "on Debian: apt install libcurl4 libibverbs1 libnuma1"
        ) from error
    kind: type[Client] = MooncakeDistributedStore
    return kind

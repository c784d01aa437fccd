"""Where a Redis server is and how to log in: read from the settings, with nothing secret in any message."""

import re
import ssl
from dataclasses import dataclass, field
from typing import NoReturn, Self
from urllib.parse import unquote

from kvass.config import Settings
from kvass.errors import ConfigError

_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_.-]+))(?::(?P<port>[0-9]{1,5}))?")
_PORT = 6379


def _wrong(what: str) -> NoReturn:
    # never the URL or a piece of it: where it is misread, any piece may be the password
    raise ConfigError(
        f"redis_url: {what}; write it as redis://user:password@host:6379/0, with signs such as / @ # % in "
        "the password as %2F %40 %23 %25"
    )


@dataclass(frozen=True)
class Address:
    """One server, or the members of a cluster that are asked for the others."""

    hosts: tuple[tuple[str, int], ...]
    path: str
    database: int
    cluster: bool
    tls: bool
    ca_file: str | None
    username: str | None
    password: str | None = field(repr=False)

    def __str__(self) -> str:
        return self.path or ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts
        )

    @classmethod
    def read(cls, settings: Settings) -> Self:
        """From redis_url, redis_password_file and redis_ca_file. Raises ConfigError."""
        scheme, found, rest = settings.redis_url.partition("://")
        if not found or scheme not in _SCHEMES:
            _wrong("its scheme is none of " + ", ".join(f"{one}://" for one in _SCHEMES))
        rest, _, query = rest.partition("?")
        if "#" in rest + query:
            _wrong("it has a #")
        before, _, path = rest.partition("/")
        login, _, hosts = before.rpartition("@")
        if "@" in path and scheme != "unix":
            _wrong("it has a / before its @")
        username, _, password = (unquote(part) for part in login.partition(":"))
        tls, cluster = scheme.startswith("rediss"), scheme.endswith("+cluster")
        places: tuple[tuple[str, int], ...] = ()
        if scheme == "unix":
            if hosts or not path:
                _wrong("after unix:// comes the absolute path of a socket")
            database = _database(query.removeprefix("db=") if query.startswith("db=") else query)
        else:
            if query:
                _wrong("it has a ?, and options are not read from it")
            places = tuple(_place(one) for one in hosts.split(","))
            if len(places) > 1 and not cluster:
                _wrong("it has several hosts, which only a cluster has")
            database = _database(path)
        if cluster and database:
            _wrong("it has a database number, but a cluster has only database 0")
        return cls(
            places,
            "/" + unquote(path) if scheme == "unix" else "",
            database,
            cluster,
            tls,
            _ca_file(settings, tls),
            username or None,
            _password(settings, password),
        )


def _place(text: str) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    if not match:
        _wrong("it has no host, or its port is no number" if text else "it has no host")
    port = int(match["port"] or _PORT)
    if not 0 < port < 1 << 16:
        _wrong("its port is not between 1 and 65535")
    return match["six"] or match["host"], port


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        _wrong("what follows the host is no database number")
    return int(text)


def _password(settings: Settings, written: str) -> str | None:
    file = settings.redis_password_file
    if file is None:
        return written or None
    if written:
        raise ConfigError("redis_url has a password and redis_password_file is set; keep one of them")
    try:
        password = file.read_text().strip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"redis_password_file: {file} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"redis_password_file: cannot read {file}: {error.strerror}") from error
    if not password:
        raise ConfigError(f"redis_password_file: {file} is empty; write the password into it")
    return password


def _ca_file(settings: Settings, tls: bool) -> str | None:
    file = settings.redis_ca_file
    if file is None:
        return None
    if not tls:
        raise ConfigError("redis_ca_file is set, but redis_url is not rediss:// and so does not use TLS")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(f"redis_ca_file: {file} holds no certificates in PEM form") from error
    except OSError as error:
        raise ConfigError(f"redis_ca_file: cannot read {file}: {error.strerror}") from error
    return str(file)

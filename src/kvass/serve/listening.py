"""The address of a server: loopback, or any where there are API keys."""

import ipaddress
import socket

from kvass.errors import ConfigError
from kvass.serve.tenants import Tenants


def listen(host: str, port: int, tenants: Tenants) -> socket.socket:
    """A socket that takes connections; `port` 0: any that is free.

    Raises ConfigError for an address that cannot be used, or that others can reach while there are no keys.
    """
    if not tenants and not _is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and there are no API keys: set api_keys_file "
            "(`kvass key TENANT` makes a key), or serve on 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError, TypeError) as error:  # TypeError: no name that DNS could have
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}; choose another --port") from error


def url_of(listening: socket.socket) -> str:
    """Where clients find it."""
    address, port = listening.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

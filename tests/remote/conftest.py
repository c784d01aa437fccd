"""A Redis server for the tests of what happens to one."""

from collections.abc import Iterator

import pytest

from harness.redis_server import RedisServer, opened, redis_server
from kvass.tiers.redis import RedisStore


@pytest.fixture(scope="session")
def _server() -> Iterator[RedisServer]:
    with redis_server() as one:
        yield one


@pytest.fixture
def server(_server: RedisServer) -> RedisServer:
    """One that holds nothing."""
    _server.admin.flushall()
    return _server


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    """A store over it."""
    with opened(server) as one:
        yield one
